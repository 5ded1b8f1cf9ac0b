"""Users' cases: activation checkpointing, which runs forward once more inside backward."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
from ranks import RankPool
from test_cases_layout import FP64, randn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from syncbn_triton import SyncBatchNorm

Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
# The first checkpoint of a process imports torch's compiler, which takes seconds.
TIMEOUT = timedelta(seconds=60)
MODES = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
# The choice is made above the kernels; that they recompute the same is tested below.
ATEN = pytest.mark.parametrize("backend", ["aten"], indirect=True)


def plainly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


# What a step does with a layer; `run` checkpoints a part of it, or does not.
STEPS: dict[str, Callable[[Run, nn.Module, Tensor], Tensor]] = {
    "one call": lambda run, norm, x: run(norm, x),
    "inside a block": lambda run, norm, x: run(lambda x: norm(x.sin()).tanh(), x),
    "two calls": lambda run, norm, x: run(norm, x) * run(norm, x.cos()),
    "two places in a block": lambda run, norm, x: run(lambda x: norm(norm(x).tanh()), x),
    "blocks in a row": lambda run, norm, x: run(norm, run(norm, x).tanh()),
    "one place of two": lambda run, norm, x: norm(run(norm, x).tanh()),
    "nested": lambda run, norm, x: run(lambda x: run(norm, x.sin()).tanh(), x),
}


def step(name: str, run: Run, x: Tensor) -> dict[str, Tensor]:
    """Output, gradients and state after one step."""
    norm, x = SyncBatchNorm(3).double(), x.detach().requires_grad_()
    y = STEPS[name](run, norm, x)
    y.tanh().sum().backward()
    gradients = {f"grad_{name}": p.grad for name, p in norm.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients, **norm.state_dict()}


def assert_a_step_as_without(name: str, use_reentrant: bool, x: Tensor) -> None:
    """Bitwise: a recomputed output that differed would show in the gradients."""
    right = step(name, plainly, x)
    actual = step(name, partial(checkpoint, use_reentrant=use_reentrant), x)
    torch.testing.assert_close(actual, right, rtol=0, atol=0)


@pytest.mark.parametrize("name", STEPS)
@MODES
@ATEN
# A checkpoint inside another sees what the outer one does not track yet.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_l10_a_step_as_without_checkpoint(backend: str, name: str, use_reentrant: bool) -> None:
    """pytorch#96136."""
    assert_a_step_as_without(name, use_reentrant, randn(4, 3, 2))


def steps_as_without_checkpoint(rank: int, use_reentrant: bool, xs: list[Tensor]) -> None:
    for name in STEPS:
        assert_a_step_as_without(name, use_reentrant, xs[rank])


@pytest.mark.parametrize("split", [(2, 3), (4, 0)], ids=str)
@MODES
def test_l10_a_step_as_without_checkpoint_across_ranks(
    ranks: RankPool, use_reentrant: bool, split: tuple[int, ...]
) -> None:
    xs = randn(sum(split), 3, 2).split(split)
    ranks.run(2, steps_as_without_checkpoint, use_reentrant, xs, timeout=TIMEOUT)


def outputs_of_both_passes(rank: int, use_reentrant: bool, xs: list[Tensor]) -> list[Tensor]:
    norm, outputs = SyncBatchNorm(3), []
    norm.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    with set_checkpoint_early_stop(False):
        y = checkpoint(norm, xs[rank].requires_grad_(), use_reentrant=use_reentrant)
        y.square().sum().backward()
    assert norm.num_batches_tracked == 1
    return outputs


@pytest.mark.parametrize("implementation", ["aten", "triton"])
@MODES
def test_l10_the_recomputed_output_is_that_of_the_first_pass(
    ranks: RankPool, use_reentrant: bool, implementation: str
) -> None:
    xs = torch.randn(5, 3, 4).split((2, 3))
    arguments = (outputs_of_both_passes, use_reentrant, xs)
    for first, second in ranks.run(2, *arguments, backend=implementation, timeout=TIMEOUT):
        assert torch.equal(first, second)


@pytest.mark.parametrize("momentum", [0.1, None])
@MODES
@ATEN
def test_l10_steps_go_on_counting(
    backend: str, use_reentrant: bool, momentum: float | None
) -> None:
    """A recomputation leaves nothing behind that would keep later steps from updating."""
    ours = SyncBatchNorm(3, momentum=momentum, dtype=torch.float64)
    torchs = nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)
    for _ in range(3):
        x = randn(4, 3, 2).requires_grad_()
        checkpoint(ours, x, use_reentrant=use_reentrant).sum().backward()
        torchs(x.detach())
    torch.testing.assert_close(ours.state_dict(), torchs.state_dict(), **FP64)


def penalized(run: Run, x: Tensor) -> dict[str, Tensor]:
    norm, x = SyncBatchNorm(3).double(), x.detach().requires_grad_()
    (dx,) = torch.autograd.grad(run(norm, x).tanh().sum(), x, create_graph=True)
    dx.square().sum().backward()
    return {"x": x.grad, "weight": norm.weight.grad, **norm.state_dict()}


def penalize_on_rank(rank: int, xs: list[Tensor]) -> None:
    right = penalized(plainly, xs[rank])
    actual = penalized(partial(checkpoint, use_reentrant=False), xs[rank])
    torch.testing.assert_close(actual, right, **FP64)


def test_l10_gradient_penalty(ranks: RankPool) -> None:
    """The graph of the first derivative recomputes too; reentrant checkpoints cannot do this."""
    ranks.run(2, penalize_on_rank, randn(5, 3, 2).split((2, 3)), timeout=TIMEOUT)


class Twice(nn.Module):
    """A block in two places."""

    def __init__(self, norm: nn.Module, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(3, 3), norm, nn.Tanh()).double()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, self.run(self.block, x))


def step_of_ddp(rank: int, xs: list[Tensor]) -> dict[str, Tensor]:
    module = Twice(SyncBatchNorm(3), partial(checkpoint, use_reentrant=False))
    # Held: the gradients are averaged by the wrapper, not by the graph.
    model = DistributedDataParallel(module)
    model(xs[rank]).square().sum().backward()
    return {**module.state_dict(), "grad": module.block[0].weight.grad}


def test_l10_under_ddp(ranks: RankPool) -> None:
    x = randn(6, 3)
    results = ranks.run(2, step_of_ddp, x.split((2, 4)), timeout=TIMEOUT)
    module = Twice(nn.BatchNorm1d(3), plainly)
    # DDP averages the gradients of its two ranks.
    (module(x).square().sum() / 2).backward()
    right = {**module.state_dict(), "grad": module.block[0].weight.grad}
    for result in results:
        torch.testing.assert_close(result, right, **FP64)
