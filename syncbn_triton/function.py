"""Forward and backward of the layer: operations, and one all-reduce in each direction.

The all-reduces are issued in program order whatever this rank's batch is and whichever gradients it
needs, and their size depends on the number of channels alone: ranks always meet.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import operations


class SyncBatchNormFunction(torch.autograd.Function):
    """``y = (x - mean) / sqrt(var + eps) * weight + bias`` over the batch of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        momentum: float | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        moments = operations.channel_stats(x)
        if group is not None:
            dist.all_reduce(moments, group=group)
        y, stats = operations.normalize(
            x,
            moments,
            weight,
            bias,
            running_mean,
            running_var,
            num_batches_tracked,
            momentum,
            eps,
        )
        ctx.save_for_backward(x, weight, stats)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.group = group
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, stats = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight_dtype = None if weight is None else weight.dtype
        # The parameters' gradients are those of this rank: DDP averages them like all others.
        sums, grad_weight, grad_bias = operations.backward_reduce(
            x, dy, stats, weight_dtype, ctx.bias_dtype
        )
        if ctx.group is not None:
            dist.all_reduce(sums, group=ctx.group)
        dx = operations.backward_input(x, dy, stats, weight, sums) if needs_x else None
        return (
            dx,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            *[None] * 6,
        )
