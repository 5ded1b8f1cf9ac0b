"""Users' cases: first derivatives, and arguments that do not fit."""

import re
from itertools import product
from typing import Any

import pytest
import torch
from oracle import torch_step
from ranks import RankPool
from test_cases_layout import FP64, randn, random_layer, step_on_rank_as_laid_out, together
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn_triton import SyncBatchNorm, sync_batch_norm

# What is expanded to the shape of y, as backward of a sum does with one value.
EXPANDED = {"one value": (), "per channel": (3, 1, 1), "per pixel": (4, 5), "per row": (4, 1)}


@pytest.mark.parametrize("size", EXPANDED.values(), ids=EXPANDED)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("implementation", ["aten", "triton"])
def test_l4_expanded_gradient(
    ranks: RankPool,
    implementation: str,
    memory_format: torch.memory_format,
    size: tuple[int, ...],
) -> None:
    layer, x, dy = random_layer(3), randn(5, 3, 4, 5), randn(*size).expand(5, 3, 4, 5)
    xs = [share.contiguous(memory_format=memory_format) for share in x.split((2, 3))]
    steps = ranks.run(
        2, step_on_rank_as_laid_out, layer, xs, dy.split((2, 3)), backend=implementation
    )
    right = torch_step(layer, x, dy, torch.float64)
    torch.testing.assert_close(vars(together(steps)), vars(right), **FP64)


def gradients_where_asked(
    rank: int, options: dict[str, Any], mask: dict[str, bool], xs: list[Tensor], dys: list[Tensor]
) -> dict[str, Tensor]:
    """Gradients that a backward leaves, of x and of each parameter the layer has."""
    module = SyncBatchNorm(3, dtype=torch.float64, **options)
    leaves = {"x": xs[rank].detach().clone(), **dict(module.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(mask[name])
    y = module(leaves["x"])
    assert y.requires_grad == any(mask[name] for name in leaves)
    if y.requires_grad:
        y.backward(dys[rank])
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


MASKS = [
    dict(zip(("x", "weight", "bias"), mask, strict=True))
    for mask in product((True, False), repeat=3)
]


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"affine": False}], ids=str)
def test_l7_gradients_exactly_where_asked(backend: str, options: dict[str, Any]) -> None:
    """Paddle#67559."""
    x, dy = randn(4, 3, 2), randn(4, 3, 2)
    complete = gradients_where_asked(0, options, MASKS[0], [x], [dy])
    torchs = nn.BatchNorm1d(3, dtype=torch.float64, **options)
    leaves = {"x": x.clone().requires_grad_(), **dict(torchs.named_parameters())}
    torchs(leaves["x"]).backward(dy)
    torch.testing.assert_close(complete, {n: leaf.grad for n, leaf in leaves.items()}, **FP64)
    for mask in MASKS:
        gradients = gradients_where_asked(0, options, mask, [x], [dy])
        assert gradients.keys() == {name for name in complete if mask[name]}
        for name, gradient in gradients.items():
            assert torch.equal(gradient, complete[name])


def gradients_for_all_masks(
    rank: int, xs: list[Tensor], dys: list[Tensor]
) -> list[dict[str, Tensor]]:
    return [gradients_where_asked(rank, {}, mask, xs, dys) for mask in MASKS]


def test_l7_gradients_exactly_where_asked_across_ranks(ranks: RankPool) -> None:
    shares = randn(5, 3, 2).split((2, 3)), randn(5, 3, 2).split((2, 3))
    for of_rank in ranks.run(2, gradients_for_all_masks, *shares):
        for mask, gradients in zip(MASKS, of_rank, strict=True):
            assert gradients.keys() == {name for name, asked in mask.items() if asked}
            for name, gradient in gradients.items():
                assert torch.equal(gradient, of_rank[0][name])


def test_l7_a_graph_that_is_kept_gives_the_same_again(backend: str) -> None:
    module, x, dy = SyncBatchNorm(3).double(), randn(4, 3, 2).requires_grad_(), randn(4, 3, 2)
    y = module(x)
    leaves = (x, module.weight, module.bias)
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    for once, again in zip(first, torch.autograd.grad(y, leaves, dy), strict=True):
        assert torch.equal(once, again)


def two_forwards_one_backward(rank: int, training: bool, xs: list[Tensor]) -> dict[str, Tensor]:
    """DDP writes the buffers of rank 0 over those of the others before each forward."""
    module = SyncBatchNorm(3).double().train(training)
    module.running_var.fill_(2.0 + rank)
    model = DistributedDataParallel(module)
    a, b = xs[rank].chunk(2)
    (model(a).square() + model(b).tanh()).sum().backward()
    gradients = {f"grad_{name}": parameter.grad for name, parameter in module.named_parameters()}
    return {**gradients, **module.state_dict()}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("implementation", ["aten", "triton"])
def test_l11_two_forwards_and_one_backward(
    ranks: RankPool, implementation: str, training: bool
) -> None:
    """pytorch#175024."""
    xs = [randn(4, 3, 2), randn(4, 3, 2) + 1]
    results = ranks.run(2, two_forwards_one_backward, training, xs, backend=implementation)
    torchs = nn.BatchNorm1d(3).double().train(training)
    torchs.running_var.fill_(2.0)
    a, b = (torch.cat(halves) for halves in zip(*(x.chunk(2) for x in xs), strict=True))
    # DDP averages the gradients of its two ranks.
    ((torchs(a).square() + torchs(b).tanh()).sum() / 2).backward()
    right = {f"grad_{name}": p.grad for name, p in torchs.named_parameters()}
    for name, value in {**right, **torchs.state_dict()}.items():
        torch.testing.assert_close(results[0][name], value, **FP64)
        assert torch.equal(results[1][name], results[0][name])


class NothingRuns(TorchDispatchMode):
    """Fails on any operator."""

    def __torch_dispatch__(self, func: Any, *_: Any) -> None:
        raise AssertionError(f"{func} ran")


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("shape", [(2,), (4,), (0,), (), (1,), (3, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("name", ["running_mean", "running_var", "weight", "bias"])
def test_l14_arguments_of_another_length(name: str, shape: tuple[int, ...], training: bool) -> None:
    """pytorch#189828."""
    x = torch.randn(4, 3, 2)
    arguments = {n: torch.ones(3) for n in ("running_mean", "running_var", "weight", "bias")}
    arguments[name] = torch.ones(shape)
    with (
        NothingRuns(),
        pytest.raises(
            ValueError, match=rf"expected {name} of shape \(3,\) .* \(got {re.escape(str(shape))}"
        ),
    ):
        sync_batch_norm(x, **arguments, training=training)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str
)
@pytest.mark.parametrize("size", [(2, 4), (2, 1, 3), (3, 2, 3, 3)], ids=str)
def test_l14_input_of_other_channels(
    size: tuple[int, ...], options: dict[str, Any], training: bool
) -> None:
    module, x = SyncBatchNorm(3, **options).train(training), torch.randn(size)
    with NothingRuns(), pytest.raises(ValueError, match=rf"with {size[1]} channels \(got \(3,\)\)"):
        module(x)
