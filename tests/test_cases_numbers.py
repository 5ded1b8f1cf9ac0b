"""Numbers that users of synchronized batch norms met, against the oracle.

Of the cases N1 to N17, these are the ones about the range of values: N3 to N7, N10 and N11.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from oracle import Layer, Step, torch_step
from ranks import RankPool
from steps import check_step_on_ranks, fresh, step_on_ranks
from test_kernels import make_layer
from torch import Tensor

from syncbn_triton import SyncBatchNorm

FORMATS = pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=str
)


def exact_step(layer: Layer, xs: Sequence[Tensor], dy: Tensor) -> Step:
    return torch_step(layer, torch.cat(xs), dy, torch.float64)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """The largest of all elements."""
    return ((ours.double() - exact) / exact).abs().max().item()


@pytest.mark.parametrize(
    ("offset", "memory_format", "y_bound", "var_bound"),
    [
        (1e4, torch.contiguous_format, 2e-6, 1e-6),
        (-1e4, torch.channels_last, 2e-6, 1e-6),
        (1e6, torch.channels_last, 1e-3, 1e-3),
        (-1e6, torch.contiguous_format, 1e-3, 1e-3),
    ],
    ids=str,
)
def test_n3_mean_that_dwarfs_the_deviation(
    ranks: RankPool,
    backend: str,
    offset: float,
    memory_format: torch.memory_format,
    y_bound: float,
    var_bound: float,
) -> None:
    """tensorflow#118701."""
    xs = [torch.randn(2, 3, 16, 16) + offset for _ in range(2)]
    layer = fresh(3, momentum=1.0)
    step, dy = step_on_ranks(ranks, backend, layer, xs, memory_format)
    exact = exact_step(layer, xs, dy)
    assert (step.y - exact.y).abs().max() < y_bound
    assert relative_error(step.running_var, exact.running_var) < var_bound


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance to the next number of a dtype, at each of these values."""
    _, exponents = torch.frexp(values)
    return torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps), exponents - 1)


@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    [(torch.bfloat16, torch.contiguous_format), (torch.float16, torch.channels_last)],
    ids=str,
)
def test_n4_low_precision_input_away_from_zero(
    ranks: RankPool, backend: str, dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    xs = [(torch.randn(1, 64, 32, 32) * 0.1 + 5).to(dtype) for _ in range(2)]
    layer = fresh(64)
    step, dy = step_on_ranks(ranks, backend, layer, xs, memory_format)
    for result in vars(step).values():
        assert result.isfinite().all()
    exact = exact_step(layer, xs, dy).y
    assert ((step.y.double() - exact).abs() <= 2 * ulp(exact, dtype)).all()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (3e8, torch.float32),
        (-3e8, torch.float32),
        (1e4 / 3, torch.float32),
        (1e18, torch.float32),
        (65504.0, torch.float16),
        (3e8, torch.bfloat16),
        (3e8, torch.float64),
        (0.0, torch.float32),
    ],
    ids=str,
)
def test_n5_constant_input(ranks: RankPool, backend: str, value: float, dtype: torch.dtype) -> None:
    """pytorch#5410: nothing is left of the input, to the last bit."""
    layer = fresh(3)
    layer.bias = torch.randn(3)
    layer.weight = torch.randn(3)
    xs = [torch.full((n, 3, 5, 5), value, dtype=dtype) for n in (1, 4)]
    step, _ = step_on_ranks(ranks, backend, layer, xs)
    assert torch.equal(step.y, layer.bias.to(dtype).view(1, 3, 1, 1).expand_as(step.y))
    assert step.dx.isfinite().all()


def one_rank_of_zeros() -> list[Tensor]:
    return [torch.zeros(1, 3, 8, 8), torch.randn(1, 3, 8, 8) + 1e4]


def a_large_rank_of_zeros() -> list[Tensor]:
    return [torch.randn(1, 3, 8, 8) + 1e4, torch.zeros(7, 3, 8, 8)]


def padded_borders() -> list[Tensor]:
    return [F.pad(torch.randn(2, 3, 8, 8) + 1e4, (1, 1, 1, 1)) for _ in range(2)]


def one_value_among_zeros() -> list[Tensor]:
    xs = [torch.zeros(2, 3, 8, 8) for _ in range(2)]
    xs[1][1, :, 7, 7] = 1e4
    return xs


@FORMATS
@pytest.mark.parametrize(
    "batch", [one_rank_of_zeros, a_large_rank_of_zeros, padded_borders, one_value_among_zeros]
)
def test_n6_zeros_beside_large_values(
    ranks: RankPool,
    backend: str,
    memory_format: torch.memory_format,
    batch: Callable[[], list[Tensor]],
) -> None:
    layer, xs = fresh(3, momentum=1.0), batch()
    step, dy = step_on_ranks(ranks, backend, layer, xs, memory_format)
    assert relative_error(step.running_var, exact_step(layer, xs, dy).running_var) < 1e-5


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (1e-5, torch.float32),
        (1e-10, torch.float32),
        (1e-15, torch.float32),
        (1e-5, torch.float16),
        (1e-5, torch.bfloat16),
    ],
    ids=str,
)
def test_n7_small_values(ranks: RankPool, backend: str, scale: float, dtype: torch.dtype) -> None:
    layer = fresh(3, momentum=1.0)
    xs = [(torch.randn(n, 3, 8, 8) * scale).to(dtype) for n in (1, 2)]
    step, dy = step_on_ranks(ranks, backend, layer, xs)
    exact = exact_step(layer, xs, dy).running_var
    assert relative_error(step.running_var, exact) < 1e-3


@pytest.mark.parametrize(
    ("deviation", "eps"), [(3e-3, 1e-5), (1e-3, 1e-5), (3e-2, 1e-3), (1e-6, 1e-12), (1.0, 1.0)]
)
def test_n10_variance_about_as_small_as_eps(
    ranks: RankPool, backend: str, deviation: float, eps: float
) -> None:
    """vacancy#43: var + eps, not the larger of the two."""
    layer = make_layer(3, torch.float32)
    layer.eps = eps
    xs = [torch.randn(2, 3, 5, 5) * deviation for _ in range(2)]
    check_step_on_ranks(ranks, backend, layer, xs)


@pytest.mark.parametrize(
    ("ratio", "memory_format"),
    [
        (1e3, torch.contiguous_format),
        (-1e3, torch.channels_last),
        (1e4, torch.contiguous_format),
    ],
    ids=str,
)
def test_n11_gradient_of_the_weight_where_the_mean_dwarfs_the_deviation(
    ranks: RankPool, backend: str, ratio: float, memory_format: torch.memory_format
) -> None:
    """pytorch#57796."""
    layer = fresh(3)
    xs = [torch.randn(2, 3, 64, 64) / ratio + 1 for _ in range(2)]
    step, dy = step_on_ranks(ranks, backend, layer, xs, memory_format)
    assert relative_error(step.grad_weight, exact_step(layer, xs, dy).grad_weight) < 1e-5


def test_half_precision_running_variance_takes_its_share_of_one_out_of_range(backend: str) -> None:
    """The share of the batch is taken in fp64: rounded first, the variance would be infinite."""
    layer = SyncBatchNorm(2, momentum=0.1).half()
    x = torch.tensor([[300.0, 1.0], [-300.0, -1.0]])
    layer(x)
    # Unbiased variances of 180000, above half precision's 65504, and of 2.
    assert layer.running_var.tolist() == torch.tensor([18000.9, 1.1]).half().tolist()
