"""Backward as differentiable operators, for gradients of gradients.

Takes the place of the kernels where backward runs with ``create_graph=True``. The statistics are
computed anew as functions of x, around the saved mean, so that nothing cancels; every sum over
ranks is an operator whose derivative is again a sum over ranks, so that any order works.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .activation import backpropagate
from .kernels.epilogue import Epilogue
from .kernels.results import accumulator_dtype, memory_format


class AllReduceSum(torch.autograd.Function):
    """Sum over the ranks of a group; each rank's part receives the sum of all ranks' gradients.

    ``anchor`` is a scalar that requires a gradient, so that this node takes part in the next
    backward on every rank, also where its own part requires none.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup | None, anchor: Tensor) -> Tensor:
        ctx.group = group
        total = part.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum_over_ranks(grad, ctx.group), None, None


def _sum_over_ranks(part: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total: Tensor = AllReduceSum.apply(part, group, torch.zeros((), requires_grad=True))
    return total


def backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    eps: float,
    group: dist.ProcessGroup | None,
    epilogue: Epilogue,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and residual, each differentiable in x, dy and all three.

    Args:
        x: ``(N, C, *)``.
        dy: Gradient of y, of x's shape.
        weight: ``(C,)`` or None for 1.
        bias: ``(C,)`` or None for 0.
        stats: ``(3C + 1,)``, as saved by forward.
        eps: Added to the variance.
        group: Ranks that share the batch, None for this one alone.
        epilogue: What follows, and what forward saved of it.

    Returns:
        dx, in x's dtype and format; the gradients of weight and bias of this rank, ``(C,)``, in
        fp32, or fp64 for fp64 input; that of the residual, in x's dtype.
    """
    C, dtype = x.shape[1], accumulator_dtype(x)
    per_channel = (1, C) + (1,) * (x.dim() - 2)
    others = [dim for dim in range(x.dim()) if dim != 1]
    hi, lo, count = stats[:C], stats[C : 2 * C], stats[3 * C].clamp(min=1)

    d = (x.to(dtype) - hi.view(per_channel)) - lo.view(per_channel)
    moments = torch.cat([d.sum(others), d.square().sum(others)])
    mean, mean_square = (_sum_over_ranks(moments, group) / count).chunk(2)
    invstd = (mean_square - mean.square() + eps).rsqrt()
    x_hat = (d - mean.view(per_channel)) * invstd.view(per_channel)

    dy = dy.to(dtype)
    if epilogue.activation is not None:
        z = x_hat if weight is None else x_hat * weight.to(dtype).view(per_channel)
        if bias is not None:
            z = z + bias.to(dtype).view(per_channel)
        if epilogue.residual is not None:
            z = z + epilogue.residual
        elif epilogue.mask is not None:
            z = epilogue.mask
        dy = backpropagate(dy, z, epilogue.activation, epilogue.negative_slope)
    dz = dy.to(x.dtype)
    grad_bias, grad_weight = dy.sum(others), (dy * x_hat).sum(others)
    sums = _sum_over_ranks(torch.cat([grad_bias, grad_weight]), group) / count
    mean_dy, mean_dy_x_hat = (s.view(per_channel) for s in sums.chunk(2))
    scale = invstd if weight is None else invstd * weight.to(dtype)
    dx = (dy - mean_dy - x_hat * mean_dy_x_hat) * scale.view(per_channel)
    dx = dx.to(x.dtype).contiguous(memory_format=memory_format(x))
    return dx, grad_weight, grad_bias, dz
