"""The four operations for CPU tensors, from torch's own building blocks.

Same arguments, results and numerics as the Triton launchers. Sums and affine maps per channel go
through the parts of ``native_batch_norm``: broadcast arithmetic over short rows is 15 times slower.

Those add channels-last input up in one fp32 loop, whose error grows with the number of rows, so
that ``k`` rows are taken for one of ``k * C`` channels, and the ``k`` sums of each channel added in
fp64. And they know means in fp32 alone: where a mean dwarfs the deviation, they are given
``x - mean``, which is exact.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .activation import activate
from .kernels.epilogue import NONE, Epilogue
from .kernels.results import (
    accumulator_dtype,
    empty_gradients,
    empty_like_input,
    empty_moments,
    empty_statistics,
    memory_format,
)

# Elements of a block, 2 MiB of fp32: what temporaries take.
_BLOCK = 1 << 19
# The channels that rows are folded into, and the least rows that are then left.
_FOLDED_CHANNELS = 1 << 11
_FOLDED_ROWS = 16
# |mean| / std up to which a map x * a - mean * a, and a sum of x, cost at most 8 * 2^-24 of a
# standard deviation.
_WELL_CENTERED = 8.0


def channel_stats(x: Tensor) -> Tensor:
    packed = empty_moments(x)
    if x.numel() == 0:
        return packed.zero_()
    C = x.shape[1]
    count = x.numel() // C
    mean, var = _moments(x, None)
    if not bool((mean.square() <= var * _WELL_CENTERED**2).all()):
        pilot = mean.to(accumulator_dtype(x))
        mean, var = _moments(x, pilot)
        mean += pilot
    packed[:C] = mean
    torch.addcmul(var, mean, mean, out=packed[C : 2 * C])
    packed[2 * C] = 1.0
    return packed.mul_(count)


def _moments(x: Tensor, pilot: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of ``x - pilot`` per channel, in fp64."""
    acc, C = accumulator_dtype(x), x.shape[1]
    counts: list[int] = []
    moments = []
    for (block,) in _blocks(x, in_place=pilot is None and x.dtype == acc):
        d = block.to(acc) if pilot is None else _minus(block, pilot)
        moment = torch.stack(torch.batch_norm_update_stats(d, None, None, 0.0)).view(2, -1, C)
        counts += [block.numel() // moment[0].numel()] * moment.shape[1]
        moments.append(moment)
    means, variances = torch.cat(moments, 1).double()
    # Chan et al. 1983, section 3: merged around the common mean, nothing cancels.
    share = torch.tensor(counts, dtype=torch.float64).div_(sum(counts))
    mean = share @ means
    return mean, share @ means.sub_(mean).square_().add_(variances)


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
    epilogue: Epilogue = NONE,
) -> tuple[Tensor, Tensor]:
    C, acc = x.shape[1], accumulator_dtype(x)
    count = packed[2 * C].item()
    mean, var = (packed[: 2 * C] / max(count, 1.0)).view(2, C).unbind()
    var.addcmul_(mean, mean, value=-1).clamp_(min=0)
    hi, invstd = mean.to(acc), (var + eps).rsqrt_()
    stats = empty_statistics(x)
    torch.cat([hi, mean - hi, invstd, packed[2 * C :]], out=stats)
    if count:
        _track(running_mean, running_var, num_batches_tracked, momentum, mean, var, count)

    y = empty_like_input(x)
    if x.numel() == 0:
        return y, stats
    a, b = _scale_and_shift(stats, weight, bias)
    centered = _well_centered(stats)
    activation, negative_slope, residual, mask = epilogue
    if activation is None and residual is None and centered and _is_dense(x):
        return _affine_around(hi, x, a, b, centered, out=y), stats
    for x_block, y_block, residual_block, mask_block in _blocks(x, y, residual, mask):
        in_place = x.dtype == acc
        z = _affine_around(hi, x_block.to(acc), a, b, centered, y_block if in_place else None)
        if residual_block is not None:
            z += residual_block
        if mask_block is not None:
            mask_block.copy_((z <= 0).logical_not_() if activation == "relu" else z > 0)
        if not (in_place and activation is None):
            y_block.copy_(activate(z, activation, negative_slope))
    return y, stats


def backward_reduce(
    x: Tensor,
    dy: Tensor,
    stats: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epilogue: Epilogue = NONE,
    dz: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    packed, grad_weight, grad_bias = empty_gradients(x, weight_dtype, bias_dtype)
    hi, lo, invstd = _unpack(stats)
    sums = packed.zero_().view(2, -1)
    sum_dy, sum_dy_xmu = sums.unbind()
    if x.numel():
        _, saved = epilogue.saved()
        gradient_of_z = _gradient_of_z(stats, weight, bias, epilogue)
        in_place = epilogue.activation is None and x.dtype == hi.dtype
        for x_block, dy_block, saved_block, dz_block in _blocks(
            x, dy, saved, dz, in_place=in_place
        ):
            x_block, dy_block = x_block.to(hi.dtype), dy_block.to(hi.dtype)
            dy_block = gradient_of_z(dy_block, x_block, saved_block)
            if dz_block is not None:
                dz_block.copy_(dy_block)
            mean = _folded(hi, x_block)
            one = torch.ones_like(mean)
            _, of_dy_xmu, of_dy = torch.ops.aten.native_batch_norm_backward(
                dy_block, x_block, one, None, None, mean, one, True, 0.0, (False, True, True)
            )
            sum_dy += of_dy.view(-1, hi.numel()).sum(0, dtype=torch.float64)
            sum_dy_xmu += of_dy_xmu.view(-1, hi.numel()).sum(0, dtype=torch.float64)
        sum_dy_xmu.addcmul_(lo, sum_dy, value=-1)
    if weight_dtype:
        torch.mul(sum_dy_xmu, invstd, out=grad_weight)
    if bias_dtype:
        grad_bias.copy_(sum_dy)
    return packed, grad_weight, grad_bias


def backward_input(
    x: Tensor,
    dy: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    packed: Tensor,
    bias: Tensor | None = None,
    epilogue: Epilogue = NONE,
) -> Tensor:
    dx = empty_like_input(x)
    if x.numel() == 0:
        return dx
    hi, lo, invstd = _unpack(stats)
    mean_dy, mean_dy_xmu = (packed / stats[-1].item()).to(hi.dtype).view(2, -1).unbind()
    a = invstd if weight is None else weight.to(hi.dtype) * invstd
    b = (a * mean_dy_xmu).mul_(invstd).mul_(invstd).neg_()
    d = (a * mean_dy).addcmul_(lo, b).neg_()
    centered = _well_centered(stats)
    if epilogue.activation is None and centered and x.dtype == hi.dtype and _is_dense(x):
        _affine_around(hi, x, b, d, centered, out=dx)
        return dx.addcmul_(dy, a.view(-1, *[1] * (x.dim() - 2)))
    _, saved = epilogue.saved()
    gradient_of_z = _gradient_of_z(stats, weight, bias, epilogue)
    for x_block, dy_block, dx_block, saved_block in _blocks(x, dy, dx, saved):
        x_block, dy_block = x_block.to(hi.dtype), dy_block.to(hi.dtype)
        dy_block = gradient_of_z(dy_block, x_block, saved_block)
        from_x = _affine_around(hi, x_block, b, d, centered)
        scale = _folded(a, x_block).view(-1, *[1] * (x_block.dim() - 2))
        dx_block.copy_(from_x.addcmul_(dy_block, scale))
    return dx


def _gradient_of_z(
    stats: Tensor, weight: Tensor | None, bias: Tensor | None, epilogue: Epilogue
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Of blocks of dy, x and what was saved: the gradient before the activation."""
    activation, negative_slope, _, mask = epilogue
    if activation is None:
        return lambda dy, x, saved: dy
    hi, *_ = _unpack(stats)
    a, b = _scale_and_shift(stats, weight, bias)
    centered = _well_centered(stats)

    def gradient_of_z(dy: Tensor, x: Tensor, saved: Tensor | None) -> Tensor:
        if mask is not None and saved is not None:
            z = saved.to(dy.dtype)
        else:
            z = _affine_around(hi, x, a, b, centered)
            if saved is not None:
                z += saved
        if activation == "leaky_relu":
            return torch.ops.aten.leaky_relu_backward(dy, z, negative_slope, False)
        if activation == "relu":
            return torch.ops.aten.threshold_backward(dy, z, 0)
        return getattr(torch.ops.aten, f"{activation}_backward")(dy, z)

    return gradient_of_z


def _scale_and_shift(
    stats: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``a`` and ``b`` of ``z = (x - hi) * a + b``."""
    _, lo, invstd = _unpack(stats)
    a = invstd if weight is None else weight.to(lo.dtype) * invstd
    return a, -lo * a if bias is None else bias.to(lo.dtype) - lo * a


def _minus(x: Tensor, c: Tensor) -> Tensor:
    """``x - c`` per channel, in c's dtype: exact for x near c."""
    return _affine_around(c, x.to(c.dtype), torch.ones_like(c), torch.zeros_like(c), centered=True)


def _well_centered(stats: Tensor) -> bool:
    mean, _, invstd = _unpack(stats)
    return bool(((mean * invstd).abs_() <= _WELL_CENTERED).all())


def _affine_around(
    hi: Tensor, x: Tensor, a: Tensor, b: Tensor, centered: bool, out: Tensor | None = None
) -> Tensor:
    """``(x - hi) * a + b`` per channel, in one map where that loses nothing."""
    if not centered:
        x, hi = _minus(x, hi), torch.zeros_like(hi)
    hi, a, b = (_folded(c, x) for c in (hi, a, b))
    options = (x, a, b, hi, torch.ones_like(hi), False, 0.0, 0.0)
    if out is None:
        return torch.native_batch_norm(*options)[0]
    unused = (hi.new_empty(0), hi.new_empty(0))
    return torch.native_batch_norm(*options, out=(out, *unused))[0]


def _folded(c: Tensor, block: Tensor) -> Tensor:
    """A value per channel, for each of the channels that a block is folded into."""
    k = block.shape[1] // c.numel()
    return c if k == 1 else c.repeat(k)


def _track(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    mean: Tensor,
    var: Tensor,
    count: float,
) -> None:
    """Updates the running statistics."""
    if num_batches_tracked is not None:
        num_batches_tracked += 1
    if running_mean is None or running_var is None:
        return
    if momentum is None:
        assert num_batches_tracked is not None
        momentum = 1 / num_batches_tracked.item()
    unbiased = var * (count / max(count - 1, 1.0))
    for running, value in ((running_mean, mean), (running_var, unbiased)):
        running.copy_(running.double().lerp_(value, momentum))


def _unpack(stats: Tensor) -> tuple[Tensor, ...]:
    """``hi``, ``lo`` and ``invstd``."""
    return stats[:-1].view(3, -1).unbind()


def _as_rows(x: Tensor) -> bool:
    """Whether channels are next to each other in memory."""
    return x.dim() == 2 or memory_format(x) != torch.contiguous_format


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=memory_format(x))


def _blocks(x: Tensor, *others: Tensor | None, in_place: bool = False) -> Iterator[Any]:
    """Blocks of tensors of one shape, as ``(n, C, S)`` or ``(1, k * C, rows, 1)``, as x lies.

    A tensor that lies otherwise is copied; of an absent one, each block is None. Without
    temporaries made of them, in place, blocks need not be small.
    """
    N, C = x.shape[:2]
    most = x.numel() if in_place else _BLOCK

    def batches(t: Tensor) -> Sequence[Tensor]:
        return t.reshape(N, C, -1).contiguous().split(max(1, most * N // x.numel()))

    def rows(t: Tensor) -> Sequence[Tensor]:
        flat = t.movedim(1, -1).reshape(-1, C).contiguous()
        k = max(1, min(_FOLDED_CHANNELS // C, len(flat) // _FOLDED_ROWS))
        whole = len(flat) // k * k
        parts = [*flat[:whole].view(-1, k * C).split(max(1, most // (k * C)))]
        if whole < len(flat):
            parts.append(flat[whole:])
        # As images of one column, channels last: torch adds rows of two dimensions up column-wise.
        return [part[None, :, None].permute(0, 3, 1, 2) for part in parts]

    split = rows if _as_rows(x) else batches
    others_split = (repeat(None) if t is None else split(t) for t in others)
    yield from zip(split(x), *others_split, strict=False)
