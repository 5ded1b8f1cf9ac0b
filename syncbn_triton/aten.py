"""The four operations for CPU tensors, from torch's own building blocks.

Same arguments, results and numerics as the Triton launchers. Affine maps per channel go through the
inference form of ``native_batch_norm``: broadcast arithmetic over short rows is 15 times slower.
Sums are ``torch.sum``, which adds in a cascade; torch's batch-norm kernels add channels-last input
in one fp32 loop, at an error of the mean of 1e-5 standard deviations over 65536 rows.

Work goes through blocks of the batch that fit the cache, which bounds the temporaries.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .kernels.results import (
    accumulator_dtype,
    empty_gradients,
    empty_like_input,
    empty_moments,
    memory_format,
)

# Elements of a block: 2 MiB of fp32.
_BLOCK = 1 << 19
# |mean| / std up to which x * a - mean * a costs at most 4 * 2^-24 of a standard deviation.
_WELL_CENTERED = 4.0


def channel_stats(x: Tensor) -> Tensor:
    packed = empty_moments(x)
    if x.numel() == 0:
        return packed.zero_()
    blocks = [_moments(block) for (block,) in _blocks(x)]
    # Chan et al. 1983, section 3: merged around the common mean, nothing cancels.
    counts = torch.tensor([count for count, _, _ in blocks], dtype=torch.float64, device=x.device)
    n = counts.unsqueeze(1)
    means = torch.stack([mean for _, mean, _ in blocks])
    count = counts.sum()
    mean = (n * means).sum(0) / count
    m2 = (torch.stack([m2 for _, _, m2 in blocks]) + n * (means - mean).square()).sum(0)
    return torch.cat([count * mean, m2 + count * mean.square(), count.unsqueeze(0)], out=packed)


def normalize(
    x: Tensor,
    packed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    C, acc = x.shape[1], accumulator_dtype(x)
    count = packed[2 * C]
    mean = packed[:C] / count.clamp(min=1)
    var = (packed[C : 2 * C] / count.clamp(min=1) - mean.square()).clamp(min=0)
    hi = mean.to(acc)
    lo = (mean - hi).to(acc)
    invstd = (var + eps).to(acc).rsqrt()
    _track(running_mean, running_var, num_batches_tracked, momentum, mean, var, count)

    y = empty_like_input(x)
    if x.numel():
        a = invstd if weight is None else weight.to(acc) * invstd
        b = -lo * a if bias is None else bias.to(acc) - lo * a
        centered = _well_centered(hi, invstd)
        for x_block, y_block in _blocks(x, y):
            y_block.copy_(_affine_around(hi, x_block, a, b, centered))
    return y, torch.cat([hi, lo, invstd, count.to(acc).unsqueeze(0)])


def backward_reduce(
    x: Tensor,
    dy: Tensor,
    stats: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    packed, grad_weight, grad_bias = empty_gradients(x, weight_dtype, bias_dtype)
    hi, lo, invstd, _ = _unpack(stats)
    sum_dy, sum_dy_xmu = packed.zero_().chunk(2)
    if x.numel():
        for x_block, dy_block in _blocks(x, dy):
            dy_block = dy_block.to(hi.dtype)
            sum_dy += _sum(dy_block)
            sum_dy_xmu += _sum(_minus(x_block, hi).mul_(dy_block))
    sum_dy_xmu -= lo * sum_dy
    if weight_dtype:
        grad_weight.copy_(sum_dy_xmu * invstd)
    if bias_dtype:
        grad_bias.copy_(sum_dy)
    return packed, grad_weight, grad_bias


def backward_input(
    x: Tensor, dy: Tensor, stats: Tensor, weight: Tensor | None, packed: Tensor
) -> Tensor:
    dx = empty_like_input(x)
    if x.numel() == 0:
        return dx
    hi, lo, invstd, count = _unpack(stats)
    mean_dy, mean_dy_xmu = (packed / count).to(hi.dtype).chunk(2)
    a = invstd if weight is None else weight.to(hi.dtype) * invstd
    b = -a * invstd.square() * mean_dy_xmu
    d = -a * mean_dy - lo * b
    centered = _well_centered(hi, invstd)
    for x_block, dy_block, dx_block in _blocks(x, dy, dx):
        from_dy = _affine(dy_block.to(hi.dtype), a, d)
        from_x = _affine_around(hi, x_block.to(hi.dtype), b, torch.zeros_like(b), centered)
        dx_block.copy_(from_dy.add_(from_x))
    return dx


def _moments(block: Tensor) -> tuple[int, Tensor, Tensor]:
    """Count, mean and sum of squared deviations per channel, the last two in fp64."""
    count = block.numel() // block.shape[1]
    block = block.to(accumulator_dtype(block))
    pilot = _sum(block) / count
    d = _minus(block, pilot)
    # The mean of d is what rounding the pilot left over.
    left_over = _sum(d).double() / count
    m2 = _sum(d.square_()).double() - count * left_over.square()
    return count, pilot.double() + left_over, m2


def _sum(block: Tensor) -> Tensor:
    """Sum per channel."""
    return block.sum((0, 2) if block.dim() == 3 else 0)


def _minus(x: Tensor, c: Tensor) -> Tensor:
    """``x - c`` per channel, in c's dtype: exact for x near c."""
    return _affine(x.to(c.dtype), torch.ones_like(c), -c)


def _well_centered(mean: Tensor, invstd: Tensor) -> bool:
    return bool((mean.abs() * invstd <= _WELL_CENTERED).all())


def _affine_around(hi: Tensor, x: Tensor, a: Tensor, b: Tensor, centered: bool) -> Tensor:
    """``(x - hi) * a + b``, in one map where that loses nothing."""
    if centered:
        return _affine(x, a, b - hi * a)
    return _affine(_minus(x, hi), a, b)


def _affine(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``x * a + b`` per channel, in x's dtype."""
    zero, one = torch.zeros_like(a), torch.ones_like(a)
    return torch.native_batch_norm(x, a, b, zero, one, False, 0.0, 0.0)[0]


def _track(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
) -> None:
    """Updates the running statistics, by nothing if the batch is empty on every rank."""
    seen = count.clamp(max=1)
    if num_batches_tracked is not None:
        num_batches_tracked += seen.long()
    if running_mean is None or running_var is None:
        return
    if momentum is not None:
        factor = seen * momentum
    else:
        assert num_batches_tracked is not None
        factor = seen / num_batches_tracked.clamp(min=1)
    unbiased = var * (count / (count - 1).clamp(min=1))
    running_mean.copy_(torch.lerp(running_mean.double(), mean, factor))
    running_var.copy_(torch.lerp(running_var.double(), unbiased, factor))


def _unpack(stats: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    C = stats.numel() // 3
    return stats[:C], stats[C : 2 * C], stats[2 * C : 3 * C], stats[3 * C]


def _blocks(x: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of tensors of one shape, as ``(rows, C)`` or ``(n, C, S)``, whichever x lies as.

    A tensor that lies otherwise is copied.
    """
    N, C = x.shape[:2]
    as_rows = x.dim() == 2 or memory_format(x) != torch.contiguous_format
    tensors = [
        t.movedim(1, -1).reshape(-1, C) if as_rows else t.reshape(N, C, -1).contiguous()
        for t in (x, *others)
    ]
    length = max(1, _BLOCK // tensors[0][0].numel())
    yield from zip(*(t.split(length) for t in tensors), strict=True)
