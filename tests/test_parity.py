"""The layer across ranks against the oracle on the batch of all ranks together."""

from typing import Any

import pytest
import torch
from oracle import Layer, Step, assert_step
from ranks import RankPool
from torch import Tensor

from syncbn_triton import SyncBatchNorm

# Samples on each rank.
SPLITS = {
    "2 even": (2, 2),
    "2 uneven": (1, 4),
    "2, one empty": (3, 0),
    "4 even": (2, 2, 2, 2),
    "4 uneven, two empty": (1, 0, 4, 0),
}
FORMATS = {
    "2-D": ((33,), torch.contiguous_format),
    "contiguous": ((5, 6, 7), torch.contiguous_format),
    "channels-last": ((5, 6, 7), torch.channels_last),
    "channels-last 3-D": ((3, 2, 3, 4), torch.channels_last_3d),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def build(options: dict[str, Any], layer: Layer) -> SyncBatchNorm:
    """A layer of the public class in a given state."""
    module = SyncBatchNorm(**options)
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            if getattr(module, name) is not None:
                getattr(module, name).copy_(getattr(layer, name))
    return module


def step_on_rank(
    rank: int,
    options: dict[str, Any],
    layer: Layer,
    xs: list[Tensor],
    dys: list[Tensor],
    memory_format: torch.memory_format,
) -> dict[str, Any]:
    """One training step on this rank's share of the batch."""
    module = build(options, layer)
    x = xs[rank].contiguous(memory_format=memory_format).requires_grad_()
    # As backward returns it: autograd lays out x.grad as x in any case.
    dxs: list[Tensor] = []
    x.register_hook(dxs.append)
    y = module(x)
    y.backward(dys[rank])
    for result in (y, *dxs):
        assert result.dtype == x.dtype
        assert not x.numel() or result.is_contiguous(memory_format=memory_format)
    return {
        "y": y.detach(),
        "dx": x.grad,
        "grad_weight": None if module.weight is None else module.weight.grad,
        "grad_bias": None if module.bias is None else module.bias.grad,
        "running_mean": module.running_mean,
        "running_var": module.running_var,
        "num_batches_tracked": module.num_batches_tracked,
    }


def check_step(
    ranks: RankPool,
    backend: str,
    split: tuple[int, ...],
    size: tuple[int, ...],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    **options: Any,
) -> None:
    """Runs a step on every rank and compares it with the oracle."""
    C = size[0]
    options = {"num_features": C, "dtype": dtype, **options}
    x, dy = torch.randn(sum(split), *size).to(dtype), torch.randn(sum(split), *size).to(dtype)
    template = SyncBatchNorm(**options)
    layer = Layer(
        weight=None if template.weight is None else (torch.rand(C) + 0.5).to(dtype),
        bias=None if template.bias is None else torch.randn(C).to(dtype),
        running_mean=None if template.running_mean is None else torch.randn(C).to(dtype),
        running_var=None if template.running_var is None else (torch.rand(C) + 0.5).to(dtype),
        momentum=template.momentum,
        eps=template.eps,
    )
    shares = (x.split(split), dy.split(split))
    results = ranks.run(
        len(split), step_on_rank, options, layer, *shares, memory_format, backend=backend
    )
    step = Step(
        y=torch.cat([r["y"] for r in results]),
        dx=torch.cat([r["dx"] for r in results]),
        grad_weight=None,
        grad_bias=None,
        running_mean=results[0]["running_mean"],
        running_var=results[0]["running_var"],
    )
    for name in ("grad_weight", "grad_bias"):
        if results[0][name] is not None:
            setattr(step, name, torch.stack([r[name].double() for r in results]).sum(0))
    assert_step(step, layer, x, dy)
    for result in results:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(result[name], results[0][name], rtol=0, atol=0)
        assert result["num_batches_tracked"] is None or result["num_batches_tracked"] == 1


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step_on_ranks(ranks: RankPool, split: str, layout: str, dtype: torch.dtype) -> None:
    size, memory_format = FORMATS[layout]
    check_step(ranks, "aten", SPLITS[split], size, dtype, memory_format)


@pytest.mark.parametrize("split", ["2 uneven", "2, one empty", "4 uneven, two empty"])
@pytest.mark.parametrize("layout", FORMATS)
def test_step_on_ranks_through_the_kernels(ranks: RankPool, split: str, layout: str) -> None:
    size, memory_format = FORMATS[layout]
    check_step(ranks, "triton", SPLITS[split], size, torch.float32, memory_format)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"eps": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_options(ranks: RankPool, options: dict[str, Any], backend: str) -> None:
    check_step(ranks, backend, (1, 3), (5, 2, 3), torch.float32, torch.contiguous_format, **options)


def test_world_of_one_needs_no_process_group(backend: str) -> None:
    x, dy = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
    layer = Layer(torch.rand(5) + 0.5, torch.randn(5), torch.randn(5), torch.rand(5) + 0.5)
    result = step_on_rank(0, {"num_features": 5}, layer, [x], [dy], torch.contiguous_format)
    assert result.pop("num_batches_tracked") == 1
    assert_step(Step(**result), layer, x, dy)


def mean_over_deviation(ratio: float) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 16, 16) + ratio, torch.randn(8, 3, 16, 16)


@pytest.mark.parametrize(
    ("ratio", "bound"), [(1.0, 2e-6), (1e2, 2e-6), (1e4, 2e-6), (1e5, 2e-5), (1e6, 1e-3)]
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_accuracy_where_the_mean_dwarfs_the_deviation(
    ranks: RankPool, backend: str, memory_format: torch.memory_format, ratio: float, bound: float
) -> None:
    """Error of y for fp32 input; torch's layer on the CPU: 4e-7, 7e-6, 8e-4, 7e-3, 4e-2."""
    x, dy = mean_over_deviation(ratio)
    layer = Layer(torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3))
    arguments = ({"num_features": 3}, layer, x.chunk(2), dy.chunk(2), memory_format)
    results = ranks.run(2, step_on_rank, *arguments, backend=backend)
    y = torch.cat([r["y"] for r in results]).double()
    exact = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    error = (y - exact).abs().max().item()
    assert error < bound, f"error {error:.1e}, bound {bound:.0e}"


def count_collectives(rank: int, training: bool, track_running_stats: bool) -> int:
    """Collectives of one forward and backward, seen by torch's own counter of the group."""
    module = SyncBatchNorm(3, track_running_stats=track_running_stats).train(training)
    before = torch.distributed.group.WORLD._get_sequence_number_for_group()
    module(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
    return torch.distributed.group.WORLD._get_sequence_number_for_group() - before


@pytest.mark.parametrize("track_running_stats", [True, False])
def test_one_collective_in_each_direction_and_none_in_evaluation(
    ranks: RankPool, track_running_stats: bool
) -> None:
    assert ranks.run(2, count_collectives, True, track_running_stats) == [2, 2]
    assert ranks.run(2, count_collectives, False, track_running_stats) == [0, 0]


def step_in_group(rank: int, xs: list[Tensor]) -> Tensor:
    """Forward in a group of its own for each pair of ranks."""
    groups = [torch.distributed.new_group(pair) for pair in ((0, 1), (2, 3))]
    module = SyncBatchNorm(3, process_group=groups[rank // 2])
    return module(xs[rank]).detach()


def test_statistics_are_those_of_the_process_group(ranks: RankPool) -> None:
    xs = [torch.randn(2, 3, 4) * (rank + 1) + rank for rank in range(4)]
    ys = ranks.run(4, step_in_group, xs)
    for pair in ((0, 1), (2, 3)):
        x = torch.cat([xs[rank] for rank in pair])
        exact = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
        torch.testing.assert_close(
            torch.cat([ys[rank] for rank in pair]).double(), exact, rtol=0, atol=1e-6
        )
