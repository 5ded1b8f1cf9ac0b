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
from .kernels.epilogue import PIECEWISE_LINEAR, Epilogue
from .kernels.results import empty_like_input


class SyncBatchNormFunction(torch.autograd.Function):
    """``activation((x - mean) / sqrt(var + eps) * weight + bias + residual)``, over all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches_tracked: Tensor | None,
        momentum: float | None,
        eps: float,
        activation: str | None,
        negative_slope: float,
        group: dist.ProcessGroup | None,
        call: debug.Call | None,
        recording: bool,
    ) -> Tensor:
        mask = None
        if recording and residual is not None and activation in PIECEWISE_LINEAR:
            mask = empty_like_input(x, torch.uint8)
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
            *Epilogue(activation, negative_slope, residual, mask),
        )
        if activation is None or mask is not None:
            # Not needed for the activation's argument.
            residual = None
        # Without an activation only the dtype of the bias: saved, it would fail a step that changes
        # it before backward.
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(
            x, weight, None if activation is None else bias, stats, residual, mask
        )
        ctx.activation, ctx.negative_slope = activation, negative_slope
        ctx.eps, ctx.group, ctx.call = eps, group, call
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats, residual, mask = ctx.saved_tensors
        epilogue = Epilogue(ctx.activation, ctx.negative_slope, residual, mask)
        dx: Tensor | None
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        # The parameters' gradients are those of this rank: DDP averages them like all others.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            dx, grad_weight, grad_bias, dz = differentiable.backward(
                x, dy, weight, bias, stats, ctx.eps, ctx.group, epilogue
            )
        else:
            wants_dz = needs_residual and ctx.activation is not None
            weight_dtype = None if weight is None else weight.dtype
            sums, grad_weight, grad_bias, dz = operations.backward_reduce(
                x,
                dy,
                stats,
                weight_dtype,
                ctx.bias_dtype,
                weight,
                bias,
                *epilogue,
                wants_dz=wants_dz,
            )
            _all_reduce(sums, ctx.group, ctx.call and replace(ctx.call, direction="backward"))
            dx = None
            if needs_x and wants_dz:
                dx = operations.backward_input(x, dz, stats, weight, sums)
            elif needs_x:
                dx = operations.backward_input(x, dy, stats, weight, sums, bias, *epilogue)
            if ctx.activation is None:
                dz = dy
        return (
            dx,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            dz if needs_residual else None,
            *[None] * 10,
        )


def _all_reduce(packed: Tensor, group: dist.ProcessGroup | None, call: debug.Call | None) -> None:
    """Sums a packed tensor over the group in place, debugging only once ranks agree on the call."""
    if group is not None:
        if call is not None:
            debug.agree(call, group)
        dist.all_reduce(packed, group=group)
