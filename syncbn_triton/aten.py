"""The four operations for CPU tensors, from torch's own building blocks.

Same arguments, results and numerics as the Triton launchers. A map ``(x - mean) * a + b`` is one
pass, ``x * a + (b - mean * a)``, where that loses nothing; where a mean dwarfs the deviation,
``x - mean`` is made first, which is exact.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .activation import activate
from .channelwise import (
    MAPS,
    SUMS,
    add_product,
    affine,
    blocks,
    mean_and_var,
    minus,
    sums_of_products,
)
from .kernels.epilogue import NONE, Epilogue
from .kernels.results import (
    accumulator_dtype,
    empty_gradients,
    empty_like_input,
    empty_moments,
)

# |mean| / std up to which a map in one pass, and a sum of x, cost at most 8 * 2^-24 of a standard
# deviation.
_WELL_CENTERED = 8.0


def channel_stats(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return empty_moments(x).zero_()
    mean, var = _moments(x)
    if not _well_centered(mean, var):
        pilot = mean.to(accumulator_dtype(x))
        mean, var = _moments(x, pilot)
        mean += pilot
    one = mean.new_full((1,), 1.0)
    count = x.numel() // x.shape[1]
    return torch.cat([mean, var.addcmul_(mean, mean), one]).mul_(count)


def _moments(x: Tensor, pilot: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``(C,)``, fp64: mean and biased variance of ``x - pilot`` per channel."""
    acc, C = accumulator_dtype(x), x.shape[1]
    shares, means, variances = [], [], []
    for (block,) in blocks(x, channels=SUMS, whole=pilot is None and x.dtype == acc):
        d = block.to(acc)
        mean, var = (m.double() for m in mean_and_var(d if pilot is None else minus(d, pilot)))
        if d.numel() == x.numel() and len(mean) == C:
            return mean, var
        k = len(mean) // C
        shares.append(mean.new_full((k, 1), d.numel() / k / x.numel()))
        means.append(mean.view(k, C))
        variances.append(var.view(k, C))
    # Chan et al. 1983, section 3: merged around the common mean, nothing cancels.
    share, deviations, of_parts = map(torch.cat, (shares, means, variances))
    mean = (deviations * share).sum(0)
    deviations -= mean
    return mean, of_parts.addcmul_(deviations, deviations).mul_(share).sum(0)


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
    C = x.shape[1]
    count = packed[-1].item()
    moments = packed / max(count, 1.0)
    mean, var = moments[:C], moments[C:-1]
    var.addcmul_(mean, mean, value=-1).clamp_(min=0)
    if count:
        _track(running_mean, running_var, num_batches_tracked, momentum, mean, var, count)
    var += eps
    hi = mean.to(accumulator_dtype(x))
    stats = torch.cat([hi, mean - hi, var.rsqrt(), packed[-1:]]).to(hi.dtype)
    y = empty_like_input(x)
    if x.numel() == 0:
        return y, stats
    hi, lo, invstd = _unpack(stats)
    a, b = _scale_and_shift(lo, invstd, weight, bias)
    centered = _well_centered(mean, var)
    activation, negative_slope, residual, mask = epilogue
    in_place = x.dtype == hi.dtype
    whole = in_place and centered and activation is None and residual is None
    for x_block, y_block, residual_block, mask_block in blocks(
        x, y, residual, mask, channels=MAPS, whole=whole
    ):
        z = _affine_around(hi, x_block.to(hi.dtype), a, b, centered, y_block if in_place else None)
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
    packed.zero_()
    if x.numel():
        _, saved = epilogue.saved()
        gradient_of_z = _gradient_of_z(stats, weight, bias, epilogue)
        whole = x.dtype == hi.dtype and epilogue.activation is None
        for x_block, dy_block, saved_block, dz_block in blocks(
            x, dy, saved, dz, channels=SUMS, whole=whole
        ):
            x_block, dy_block = x_block.to(hi.dtype), dy_block.to(hi.dtype)
            dy_block = gradient_of_z(dy_block, x_block, saved_block)
            if dz_block is not None:
                dz_block.copy_(dy_block)
            packed += sums_of_products(x_block, dy_block, hi)
    sum_dy, sum_dy_xmu = packed[: len(hi)], packed[len(hi) :]
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
    from_means = (packed / -stats[-1].item()).to(hi.dtype)
    from_mean_dy, from_mean_dy_xmu = from_means[: len(hi)], from_means[len(hi) :]
    # dx = (x - hi) * b + d + dy * a
    a = invstd if weight is None else weight.to(hi.dtype) * invstd
    b = (a * from_mean_dy_xmu).mul_(invstd).mul_(invstd)
    d = (a * from_mean_dy).addcmul_(lo, b, value=-1)
    centered = _well_centered(hi * invstd, torch.ones_like(hi))
    _, saved = epilogue.saved()
    gradient_of_z = _gradient_of_z(stats, weight, bias, epilogue)
    in_place = x.dtype == hi.dtype
    whole = in_place and centered and epilogue.activation is None
    for x_block, dy_block, dx_block, saved_block in blocks(
        x, dy, dx, saved, channels=MAPS, whole=whole
    ):
        x_block, dy_block = x_block.to(hi.dtype), dy_block.to(hi.dtype)
        dy_block = gradient_of_z(dy_block, x_block, saved_block)
        result = _affine_around(hi, x_block, b, d, centered, dx_block if in_place else None)
        add_product(result, dy_block, a)
        if not in_place:
            dx_block.copy_(result)
    return dx


def _gradient_of_z(
    stats: Tensor, weight: Tensor | None, bias: Tensor | None, epilogue: Epilogue
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Of blocks of dy, x and what was saved: the gradient before the activation."""
    activation, negative_slope, _, mask = epilogue
    if activation is None:
        return lambda dy, x, saved: dy
    hi, lo, invstd = _unpack(stats)
    a, b = _scale_and_shift(lo, invstd, weight, bias)
    centered = _well_centered(hi * invstd, torch.ones_like(hi))

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
    lo: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``a`` and ``b`` of ``z = (x - hi) * a + b``."""
    a = invstd if weight is None else weight.to(lo.dtype) * invstd
    b = torch.zeros_like(lo) if bias is None else bias.to(lo.dtype)
    return a, torch.addcmul(b, lo, a, value=-1)


def _well_centered(mean: Tensor, var: Tensor) -> bool:
    return torch.addcmul(var, mean, mean, value=-(_WELL_CENTERED**-2)).min().item() >= 0


def _affine_around(
    hi: Tensor, x: Tensor, a: Tensor, b: Tensor, centered: bool, out: Tensor | None = None
) -> Tensor:
    """``(x - hi) * a + b`` of a block, in one map where that loses nothing."""
    if centered:
        return affine(x, hi, a, b, out)
    return affine(minus(x, hi), torch.zeros_like(hi), a, b, out)


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


def _unpack(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``hi``, ``lo`` and ``invstd``."""
    C = len(stats) // 3
    return stats[:C], stats[C : 2 * C], stats[2 * C : -1]
