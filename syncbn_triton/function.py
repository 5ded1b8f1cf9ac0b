"""Forward and backward of the layer: operations, and one all-reduce in each direction.

The all-reduces are issued in program order whatever this rank's batch is and whichever gradients it
needs, and their size depends on the number of channels alone: ranks always meet.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import debug, differentiable, operations


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
        call: debug.Call | None,
    ) -> Tensor:
        moments = operations.channel_stats(x)
        _all_reduce(moments, group, call)
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
        # Only the dtype of the bias: saved, it would fail a step that changes it before backward.
        ctx.save_for_backward(x, weight, stats)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.eps, ctx.group, ctx.call = eps, group, call
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, stats = ctx.saved_tensors
        dx: Tensor | None
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # The parameters' gradients are those of this rank: DDP averages them like all others.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            dx, grad_weight, grad_bias = differentiable.backward(
                x, dy, weight, stats, ctx.eps, ctx.group
            )
        else:
            weight_dtype = None if weight is None else weight.dtype
            sums, grad_weight, grad_bias = operations.backward_reduce(
                x, dy, stats, weight_dtype, ctx.bias_dtype
            )
            _all_reduce(sums, ctx.group, ctx.call and replace(ctx.call, direction="backward"))
            dx = operations.backward_input(x, dy, stats, weight, sums) if needs_x else None
        return (
            dx,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            *[None] * 7,
        )


def _all_reduce(packed: Tensor, group: dist.ProcessGroup | None, call: debug.Call | None) -> None:
    """Sums a packed tensor over the group in place, debugging only once ranks agree on the call."""
    if group is not None:
        if call is not None:
            debug.agree(call, group)
        dist.all_reduce(packed, group=group)
