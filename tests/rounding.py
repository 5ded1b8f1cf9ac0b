"""The pass rule for any batch whatever, where `oracle.assert_step` is for batches of some size.

A sum whose terms cancel is as exact as its terms are large. Torch's own error is then a matter of
luck, and of its CPU layer summing in double; no multiple of it bounds another layer's on every
batch. Here the bound has one more part: a rounding of each term, in the dtype that sums are in.
"""

import torch
import torch.nn.functional as F
from oracle import Layer, Step, torch_step
from torch import Tensor


def assert_step_rounds(actual: Step, layer: Layer, x: Tensor, dy: Tensor) -> None:
    """Compares each part of a step with the oracle; x and dy are those of all ranks together."""
    exact = torch_step(layer, x, dy, torch.float64)
    torchs = torch_step(layer, x, dy, x.dtype)
    terms = sizes_of_terms(layer, x, dy)
    # fp64 is its own oracle: there, two orders of summation may differ by a few roundings.
    accumulated_in, roundings = (
        (torch.float64, 16) if x.dtype == torch.float64 else (torch.float32, 1)
    )
    for name, ours in vars(actual).items():
        right = getattr(exact, name)
        if ours is None:
            assert right is None
            continue
        torch_error = (getattr(torchs, name).double() - right).abs().amax()
        bound = (
            2 * torch_error
            + max(torch.finfo(ours.dtype).eps, torch.finfo(x.dtype).eps) * right.abs().amax()
            + roundings * torch.finfo(accumulated_in).eps * getattr(terms, name).amax()
        )
        error = (ours.double() - right).abs().amax()
        assert error <= bound, f"{name}: error {error:.3e} above the bound {bound:.3e}"


def sizes_of_terms(layer: Layer, x: Tensor, dy: Tensor) -> Step:
    """What each part of a step would be if nothing in it cancelled."""

    def per_channel(t: Tensor | float) -> Tensor | float:
        return t.double().view(1, -1, *[1] * (x.dim() - 2)) if isinstance(t, Tensor) else t

    def mean(t: Tensor) -> Tensor:
        return t.mean(others, keepdim=True)

    others = [dim for dim in range(x.dim()) if dim != 1]
    in_fp64 = x.dtype == torch.float64
    x, dy = x.double(), dy.double().abs()
    invstd = 1 / (x.var(others, unbiased=False, keepdim=True) + layer.eps).sqrt()
    x_hat = F.batch_norm(x, None, None, training=True, eps=layer.eps).abs()
    if in_fp64:
        # Moments are in fp64: only there do they count, E[x^2] - E[x]^2 and x - E[x].
        mean_hat = mean(x).abs() * invstd
        x_hat = x_hat * (1 + mean_hat.square()) + mean_hat
    weight = 1.0 if layer.weight is None else per_channel(layer.weight.abs())
    bias = 0.0 if layer.bias is None else per_channel(layer.bias.abs())
    running_mean = 0.0 if layer.running_mean is None else layer.running_mean.double().abs()
    running_var = 0.0 if layer.running_var is None else layer.running_var.double()
    return Step(
        y=x_hat * weight + bias,
        dx=weight * invstd * (dy + mean(dy) + x_hat * mean(dy * x_hat)),
        grad_weight=(dy * x_hat).sum(others),
        grad_bias=dy.sum(others),
        running_mean=running_mean + x.abs().mean(others),
        running_var=running_var + x.var(others),
    )
