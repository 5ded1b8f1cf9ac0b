"""What plays a GPU on the CPU: inputs small enough for it, and torch's operators for GPUs."""

import torch
from torch import Tensor

CPU = torch.device("cpu")
TINY = (3, 5, 7, 9)


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    return v.float().view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean, var = torch.batch_norm_update_stats(input.float(), None, None, 0.0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    n, count = counts.unsqueeze(1), counts.sum()
    of_all = (n * mean).sum(0) / count
    var = (n * (invstd**-2 - eps + (mean - of_all).square())).sum(0) / count
    running_mean.lerp_(of_all, momentum)
    running_var.lerp_(var * count / (count - 1), momentum)
    return of_all, (var + eps).rsqrt()


def batch_norm_elemt(
    input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    mean, a, b = (per_channel(v, input) for v in (mean, weight * invstd, bias))
    return ((input.float() - mean) * a + b).to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    others = [dim for dim in range(input.dim()) if dim != 1]
    sum_dy = grad_out.float().sum(others)
    sum_dy_xmu = (grad_out.float() * (input.float() - per_channel(mean, input))).sum(others)
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(weight.dtype), sum_dy.to(weight.dtype)


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    n = count.sum()
    values = (mean, weight * invstd, sum_dy / n, invstd.square() * sum_dy_xmu / n)
    mean, a, mean_dy, slope = (per_channel(v, input) for v in values)
    xmu = input.float() - mean
    return ((grad_out.float() - mean_dy - xmu * slope) * a).to(input.dtype)


STAND_INS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)
