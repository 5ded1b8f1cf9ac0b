"""Counts that users of synchronized batch norms met: uneven, few, and large ones.

Of the cases N1 to N17, these are N1, N2, N8, N9, N13 and N15.
"""

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from steps import check_step_on_ranks, step_on_ranks
from syncbn_triton.kernels.merge import merge_moments
from test_kernels import make_layer
from torch import Tensor

from syncbn_triton import SyncBatchNorm, operations


def train_on_rank(
    rank: int, momentum: float | None, batches: list[list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Running statistics after a forward of this rank's share of each batch."""
    module = SyncBatchNorm(3, momentum=momentum)
    for shares in batches:
        module(shares[rank])
    return module.running_mean, module.running_var


def exact_running_statistics(
    momentum: float | None, batches: list[list[Tensor]]
) -> tuple[Tensor, Tensor]:
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for step, shares in enumerate(batches, 1):
        x = torch.cat(shares).double()
        F.batch_norm(x, mean, var, training=True, momentum=momentum or 1 / step)
    return mean, var


@pytest.mark.parametrize(
    ("size", "momentum"),
    [((3, 4, 4), 0.1), ((3, 4, 4), 1.0), ((3, 4, 4), None), ((3,), 0.1), ((3, 2, 2, 2), 0.1)],
    ids=str,
)
def test_n1_running_statistics_of_uneven_ranks(
    ranks: RankPool, backend: str, size: tuple[int, ...], momentum: float | None
) -> None:
    """pytorch#22192: unbiased by the count of all ranks, whoever holds how much of it."""
    batches = [torch.randn(5, *size).split(split) for split in ((2, 3), (4, 1), (5, 0))]
    results = ranks.run(2, train_on_rank, momentum, batches, backend=backend)
    exact = exact_running_statistics(momentum, batches)
    for result in results:
        for ours, right in zip(result, exact, strict=True):
            # Two units in the last place of values of the size of x.
            torch.testing.assert_close(ours.double(), right, rtol=2**-22, atol=2**-22)


@pytest.mark.parametrize("split", [(2, 3), (3, 2), (1, 1, 3)], ids=str)
@pytest.mark.parametrize("size", [(3, 4, 4), (3,)], ids=str)
def test_n2_gradients_of_uneven_ranks(
    ranks: RankPool, backend: str, split: tuple[int, ...], size: tuple[int, ...]
) -> None:
    """pytorch#36688: each sample weighs the same, not each rank."""
    xs = torch.randn(sum(split), *size).split(split)
    check_step_on_ranks(ranks, backend, make_layer(3, torch.float32), xs)


@pytest.mark.parametrize("split", [(1, 0), (0, 1), (0, 1, 0)], ids=str)
@pytest.mark.parametrize("size", [(3,), (3, 1, 1)], ids=str)
def test_n8_one_value_per_channel_on_all_ranks(
    ranks: RankPool, backend: str, split: tuple[int, ...], size: tuple[int, ...]
) -> None:
    """pytorch#1381: the variance of one value is 0, not 0 / 0."""
    layer = make_layer(3, torch.float32)
    xs = torch.randn(1, *size).split(split)
    step, _ = step_on_ranks(ranks, backend, layer, xs)
    assert torch.equal(step.y.flatten(), layer.bias)
    for result in vars(step).values():
        assert result.isfinite().all()


@pytest.mark.parametrize("split", [(1, 1), (0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_n8_two_values_per_channel_on_all_ranks(
    ranks: RankPool, backend: str, split: tuple[int, ...], dtype: torch.dtype
) -> None:
    xs = torch.randn(2, 3).to(dtype).split(split)
    check_step_on_ranks(ranks, backend, make_layer(3, dtype), xs)


ONE_VALUE = [(1, 3), (1, 3, 1), (1, 3, 1, 1), (1, 3, 1, 1, 1)]


@pytest.mark.parametrize("shape", ONE_VALUE, ids=str)
def test_n9_one_value_per_channel_on_each_rank(
    ranks: RankPool, backend: str, shape: tuple[int, ...]
) -> None:
    """pytorch#36865."""
    xs = [torch.randn(shape) for _ in range(2)]
    check_step_on_ranks(ranks, backend, make_layer(3, torch.float32), xs)


def raise_for_one_value(rank: int, shape: tuple[int, ...]) -> str:
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        SyncBatchNorm(3)(torch.randn(shape))
    return str(raised.value)


@pytest.mark.parametrize("shape", ONE_VALUE, ids=str)
def test_n9_one_value_per_channel_alone(ranks: RankPool, shape: tuple[int, ...]) -> None:
    """Torch's error and words, without a process group and in a world of one."""
    with pytest.raises(ValueError, match="more than 1 value") as torchs:
        F.batch_norm(torch.randn(shape), None, None, training=True)
    assert raise_for_one_value(0, shape) == str(torchs.value)
    assert ranks.run(1, raise_for_one_value, shape) == [str(torchs.value)]


@pytest.mark.parametrize(
    "shapes", [((70000, 2), (5, 2)), ((1, 1, 256, 280), (0, 1, 256, 280))], ids=str
)
def test_n13_half_layer_with_more_values_than_half_can_count(
    ranks: RankPool, backend: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    xs = [torch.randn(shape).half() for shape in shapes]
    check_step_on_ranks(ranks, backend, make_layer(shapes[0][1], torch.float16), xs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_n13_counts_are_exact(backend: str, dtype: torch.dtype) -> None:
    xs = [torch.randn(70000, 2).to(dtype), torch.randn(5, 2).to(dtype)]
    moments = sum(operations.channel_stats(x) for x in xs)
    _, stats = operations.normalize(xs[1], moments, None, None, None, None, None, 0.1, 1e-5)
    assert moments[-1] == stats[-1] == 70005


# None of these sums is exact in fp32, and all but one of them leave int32.
LARGE_COUNTS = pytest.mark.parametrize(
    "counts", [(2**31, 5), (5, 2**31), (2**24, 1), (2**31 + 1,) * 3, (2**40, 3, 1)], ids=str
)


def moments_of(counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Made-up means and variances of parts of these sizes, two channels of each."""
    return torch.rand(len(counts), 2).double() + 1, torch.rand(len(counts), 2).double() + 0.5


def exact_moments(
    counts: Sequence[int], means: Tensor, m2s: Tensor
) -> tuple[int, list[Fraction], list[Fraction]]:
    """Count, mean and mean of the square of all parts together, in exact arithmetic."""
    total = sum(counts)
    mean, square = [], []
    for channel in zip(means.T.tolist(), m2s.T.tolist(), strict=True):
        parts = [
            (n, Fraction(part_mean), Fraction(m2))
            for n, part_mean, m2 in zip(counts, *channel, strict=True)
        ]
        mean.append(sum(n * part_mean for n, part_mean, _ in parts) / total)
        square.append(sum(m2 + n * part_mean**2 for n, part_mean, m2 in parts) / total)
    return total, mean, square


def to_fp64(values: list[Fraction]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


@LARGE_COUNTS
def test_n15_merge_of_large_counts(counts: tuple[int, ...]) -> None:
    means, variances = moments_of(counts)
    n = torch.tensor(counts, dtype=torch.float64).unsqueeze(1)
    packed = torch.empty(5, dtype=torch.float64)
    rows = torch.cat([means, n * variances, n], dim=1)
    merge_moments(len(counts), 2, rows.device).launch(rows, packed)
    total, mean, square = exact_moments(counts, means, n * variances)
    assert packed[4] == total
    exact = to_fp64([total * value for value in mean + square])
    torch.testing.assert_close(packed[:4], exact, rtol=2**-50, atol=0)


@LARGE_COUNTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_n15_large_counts_of_ranks(
    backend: str, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    """Moments of ranks that hold so much, added as the all-reduce adds them, then normalized by."""
    means, variances = moments_of(counts)
    n = torch.tensor(counts, dtype=torch.float64).unsqueeze(1)
    packed = torch.cat([n * means, n * (variances + means.square()), n], dim=1).sum(0)
    running = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    x = torch.randn(1, 2, dtype=dtype)
    _, stats = operations.normalize(x, packed, None, None, *running, None, 1.0, 1e-5)
    total, mean, square = exact_moments(counts, means, n * variances)
    unbiased = [
        (square - mean**2) * Fraction(total, total - 1)
        for mean, square in zip(mean, square, strict=True)
    ]
    assert packed[-1] == total
    assert stats[-1] == torch.tensor(total, dtype=dtype)
    torch.testing.assert_close(running[0], to_fp64(mean), rtol=2**-50, atol=0)
    torch.testing.assert_close(running[1], to_fp64(unbiased), rtol=2**-48, atol=0)
