"""What torch's own suite asks of SyncBatchNorm under DistributedDataParallel, on CPU ranks.

Counterparts of the tests that name SyncBatchNorm in torch's distributed_test.py. There, fp32 runs
are compared with each other, within the tolerance of ``torch.testing.assert_close``. Here one
process in float64 on the whole batch is right, and ranks in fp32 come within that tolerance, those
in float64 within 1e-12.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import assert_near
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_triton import SyncBatchNorm, convert_sync_batchnorm

State = dict[str, Tensor]
# That of torch.testing.assert_close in fp32.
TOLERANCES = {torch.float32: (1.3e-6, 1e-5), torch.float64: (1e-12, 1e-12)}


def assert_states(actual: State, exact: State, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCES[dtype]
    assert actual.keys() == exact.keys()
    for name, value in exact.items():
        ours = actual[name].to(value.dtype)
        prefixed = f"{name}: {{}}".format
        torch.testing.assert_close(ours, value, rtol=rtol, atol=atol, msg=prefixed)


def net(**options: Any) -> nn.Sequential:
    """A batch norm of three-dimensional input between linear layers."""
    return nn.Sequential(
        nn.Linear(2, 40, bias=False),
        nn.Unflatten(1, (4, 10)),
        nn.BatchNorm1d(4, **options),
        nn.Flatten(),
        nn.Linear(40, 4, bias=False),
        nn.Softmax(dim=1),
    )


def distributed(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(convert_sync_batchnorm(model))


def reloaded(model: nn.Module) -> nn.Module:
    """The model as saved whole and loaded."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def snapshot(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def descend(model: nn.Module, loss: Tensor) -> None:
    """A step of gradient descent."""
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad


def descend_on_share(
    rank: int, model: nn.Module, x: Tensor, target: Tensor, split: tuple[int, ...]
) -> None:
    """A step on this rank's share of a batch."""
    y = model(x.split(split)[rank])
    if y.dim() > 3:
        memory_format = torch.channels_last if y.dim() == 4 else torch.channels_last_3d
        assert y.is_contiguous(memory_format=memory_format)
    # The loss is a mean over the whole batch, and the gradients one over the ranks.
    loss = (y - target.split(split)[rank]).square().sum() * len(split) / target.numel()
    descend(model, loss)


def train_on_rank(
    rank: int, model: nn.Module, xs: list[Tensor], targets: list[Tensor], split: tuple[int, ...]
) -> list[State]:
    """States after each step; the model is saved and loaded before and on the way."""
    model, states = reloaded(distributed(model)), []
    for i, (x, target) in enumerate(zip(xs, targets, strict=True)):
        descend_on_share(rank, model, x, target, split)
        states.append(snapshot(model.module))
        if i == 2:
            model = reloaded(model)
    return states


def train_alone(model: nn.Module, xs: list[Tensor], targets: list[Tensor]) -> list[State]:
    """The states that training on ranks should give: those of one process in float64."""
    model, states = copy.deepcopy(model).double(), []
    for x, target in zip(xs, targets, strict=True):
        descend(model, (model(x.double()) - target.double()).square().mean())
        states.append(snapshot(model))
    return states


# A model, the size of a sample, and the samples on each rank.
TRAININGS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "net": (net, (2,), (2, 2)),
    "without affine": (lambda: net(affine=False), (2,), (2, 2)),
    "2-D input": (lambda: nn.BatchNorm1d(2), (2,), (2, 2)),
    "one sample a rank": (lambda: nn.BatchNorm1d(2), (2,), (1, 1)),
    "uneven ranks": (net, (2,), (2, 3, 4)),
    "channels-last": (lambda: nn.BatchNorm2d(2, momentum=0.99), (2, 4, 4), (2, 2)),
    "channels-last 3-D": (lambda: nn.BatchNorm3d(2, momentum=0.99), (2, 4, 4, 4), (2, 2)),
}


@pytest.mark.parametrize(
    ("implementation", "dtype", "case"),
    [
        *[("aten", dtype, case) for dtype in TOLERANCES for case in TRAININGS],
        # Interpreted kernels are slow.
        *[("triton", torch.float32, case) for case in ("2-D input", "uneven ranks")],
    ],
    ids=str,
)
def test_training(ranks: RankPool, implementation: str, dtype: torch.dtype, case: str) -> None:
    """Parameters and buffers after each of five steps."""
    build, size, split = TRAININGS[case]
    model = build().to(dtype)
    memory_format = {3: torch.channels_last, 4: torch.channels_last_3d}.get(
        len(size), torch.contiguous_format
    )
    xs = [
        torch.randn(sum(split), *size, dtype=dtype).contiguous(memory_format=memory_format)
        for _ in range(5)
    ]
    outputs = [copy.deepcopy(model)(x).detach() for x in xs]
    targets = [torch.randn_like(y) for y in outputs]
    results = ranks.run(
        len(split), train_on_rank, model, xs, targets, split, backend=implementation
    )
    exact = train_alone(model, xs, targets)
    for states in results:
        for ours, right in zip(states, exact, strict=True):
            assert_states(ours, right, dtype)


def repeat_on_rank(rank: int, xs: list[Tensor]) -> State:
    model = DistributedDataParallel(SyncBatchNorm(2, momentum=0.99, dtype=xs[rank].dtype))
    for _ in range(10):
        model(xs[rank]).mean().backward()
    return {name: getattr(model.module, name) for name in ("running_mean", "running_var")}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_running_values_of_ranks_of_other_lengths(ranks: RankPool, dtype: torch.dtype) -> None:
    xs = [torch.randn(2, 2, 7**rank, dtype=dtype) * 3**rank + rank for rank in range(3)]
    values = torch.cat([x.double().movedim(1, 0).flatten(1) for x in xs], 1)
    exact = {"running_mean": values.mean(1), "running_var": values.var(1)}
    for state in ranks.run(3, repeat_on_rank, xs):
        assert_states(state, exact, dtype)


def half_step_on_rank(rank: int, model: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    return half_step(distributed(model), xs[rank])


def half_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of parameters."""
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


def test_half(ranks: RankPool, backend: str) -> None:
    model, x = net().half(), torch.randn(4, 2).half()
    results = ranks.run(2, half_step_on_rank, model, x.split(2), backend=backend)
    exact = half_step(copy.deepcopy(model).double(), x.double())
    torchs = half_step(model, x)
    for ours in results:
        assert all(t.dtype == torch.float16 for t in ours)
    ys = torch.cat([ours[0] for ours in results])
    assert_near("y", ys, exact[0], torchs[0], torch.float16)
    for i in range(1, len(exact)):
        # Gradients are means over the ranks.
        ours, ours_on_other_rank = (2 * result[i] for result in results)
        assert_near(f"gradient {i}", ours, exact[i], torchs[i], torch.float16)
        assert torch.equal(ours, ours_on_other_rank)


def groups_of_nested_layers(rank: int) -> None:
    group = dist.new_group([0])
    block = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "down": nn.Sequential(nn.BatchNorm1d(2))})
    model = convert_sync_batchnorm(nn.Sequential(nn.Sequential(block)), group)
    layers = [layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)]
    assert len(layers) == 2
    assert all(layer.process_group == group for layer in layers)
    if rank == 0:
        layers[0](torch.randn(3, 2)).sum().backward()


def test_conversion_passes_the_group_to_nested_layers(ranks: RankPool) -> None:
    ranks.run(2, groups_of_nested_layers)


def train_until_exhausted(
    rank: int, model: nn.Module, xs: list[Tensor], targets: list[Tensor], steps: list[int]
) -> tuple[str, list[State]]:
    """The error that ends training, and the states after each step."""
    model, states = distributed(model), []

    def train() -> None:
        with model.join(throw_on_early_termination=True):
            for x, target in zip(xs[: steps[rank]], targets, strict=False):
                descend_on_share(rank, model, x, target, (2, 2))
                states.append(snapshot(model.module))

    with pytest.raises(RuntimeError) as error:
        train()
    return str(error.value), states


def test_uneven_inputs_stop_iteration(ranks: RankPool) -> None:
    xs, targets = torch.randn(10, 4, 2).double(), torch.randn(10, 4, 4).double()
    model = net().double()
    arguments = (model, list(xs), list(targets), [10, 5])
    (first, states), (second, others) = ranks.run(2, train_until_exhausted, *arguments)
    assert "Detected at least one rank that exhausted inputs" in first
    assert "Rank 1 exhausted all inputs" in second
    assert len(states) == len(others) == 5
    exact = train_alone(model, list(xs[:5]), list(targets[:5]))
    for ours in (states, others):
        assert_states(ours[-1], exact[-1], torch.float64)


def infer_on_rank_zero(rank: int, xs: Tensor) -> list[Tensor]:
    layer = SyncBatchNorm(2, momentum=0.99, track_running_stats=False)
    model = DistributedDataParallel(layer)
    ys = []
    if rank == 0:
        model.eval()
        ys = [model(x).detach() for x in xs]
        with torch.no_grad():
            ys += [model(x) for x in xs]
    dist.barrier()
    return ys


def test_inference_on_one_rank(ranks: RankPool) -> None:
    xs = torch.randn(3, 10, 2, 4, 4)
    ys, _ = ranks.run(2, infer_on_rank_zero, xs)
    for y, x in zip(ys, [*xs, *xs], strict=True):
        exact, torchs = (
            F.batch_norm(x.to(dtype), None, None, training=True)
            for dtype in (torch.float64, torch.float32)
        )
        assert_near("y", y, exact, torchs, torch.float32)
