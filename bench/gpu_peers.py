"""torch's layers, as contestants: its SyncBatchNorm without the collectives, and its BatchNorm.

`OperatorSequence` issues what ``torch.nn.SyncBatchNorm`` issues between its collectives, in the
same order and with the same waits, for statistics of one rank (torch 2.13,
``torch/nn/modules/_functions.py``). It is what a rank computes, whatever the network costs.
"""

from typing import Any

import torch
from torch import Tensor, nn

EPS, MOMENTUM = 1e-5, 0.1


def gathered(
    x: Tensor, mean: Tensor, invstd: Tensor, count: Tensor, buffers: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation over ranks, given by rows; updates the running statistics."""
    return torch.batch_norm_gather_stats_with_counts(
        x, mean, invstd, *buffers, MOMENTUM, EPS, count
    )


class OperatorSequence(torch.autograd.Function):
    """Forward and backward of ``torch.nn.SyncBatchNorm``, less all-gather and all-reduce."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor
    ) -> Tensor:
        x = _dense(x)
        C = x.shape[1]
        mean, invstd = torch.batch_norm_stats(x, EPS)
        count = torch.full((1,), x.numel() // C, dtype=mean.dtype, device=mean.device)
        combined = torch.cat([mean, invstd, count], dim=0).reshape(1, -1)
        mean_all, invstd_all, count_all = torch.split(combined, C, dim=1)
        # Each of these waits for the device: the mask tells how long the result is.
        mask = count_all.squeeze(-1) >= 1
        count_all, mean_all, invstd_all = count_all[mask], mean_all[mask], invstd_all[mask]
        mean, invstd = gathered(
            x, mean_all, invstd_all, count_all.view(-1), (running_mean, running_var)
        )
        ctx.save_for_backward(x, weight, mean, invstd, count_all.to(torch.int32))
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, EPS)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy = _dense(dy)
        x, weight, mean, invstd, count = ctx.saved_tensors
        sum_dy, sum_dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            dy, x, mean, invstd, weight, True, True, True
        )
        combined = torch.cat([sum_dy, sum_dy_xmu], dim=0)
        sum_dy, sum_dy_xmu = torch.split(combined, sum_dy.shape[0])
        dx = torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count)
        return dx, grad_weight, grad_bias, None, None


class SequenceLayer(nn.modules.batchnorm._BatchNorm):
    """A layer over `OperatorSequence`, which counts batches as torch's does."""

    def forward(self, input: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        buffers = (self.running_mean, self.running_var)
        y: Tensor = OperatorSequence.apply(input, self.weight, self.bias, *buffers)
        return y


def native(C: int, dims: int, device: torch.device) -> nn.Module:
    """Torch's batch norm of one rank, for input of so many dimensions."""
    layer = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(dims, nn.BatchNorm1d)
    return layer(C, EPS, MOMENTUM, device=device)


def _dense(t: Tensor) -> Tensor:
    """As torch has it: channels-last is left alone, all else made contiguous."""
    last = (torch.channels_last, torch.channels_last_3d)
    return t if any(t.is_contiguous(memory_format=f) for f in last) else t.contiguous()
