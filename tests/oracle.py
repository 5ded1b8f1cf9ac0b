"""What is right: torch's batch norm in float64 on the batches of all ranks together.

And how near is near enough: within twice the error that torch's own layer makes in that dtype on
the same data, plus one unit in the last place of the largest value.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Layer:
    """Parameters, buffers and options of a layer before its first step."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float | None = 0.1
    eps: float = 1e-5


@dataclass
class Step:
    """What one training step computes and changes; gradients of parameters summed over ranks."""

    y: Tensor
    dx: Tensor
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None


def torch_step(layer: Layer, x: Tensor, dy: Tensor, dtype: torch.dtype) -> Step:
    """One step of torch's batch norm on the whole batch, with everything in one dtype."""

    def own(t: Tensor | None, grad: bool = False) -> Tensor | None:
        return None if t is None else t.detach().to(dtype, copy=True).requires_grad_(grad)

    x, dy = x.detach().to(dtype, copy=True).requires_grad_(), dy.to(dtype)
    weight, bias = own(layer.weight, True), own(layer.bias, True)
    running_mean, running_var = own(layer.running_mean), own(layer.running_var)
    # From a counter of 0, the average over all batches so far is this batch.
    momentum = 1.0 if layer.momentum is None else layer.momentum
    y = F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, layer.eps)
    y.backward(dy)
    return Step(
        y.detach(),
        x.grad,
        None if weight is None else weight.grad,
        None if bias is None else bias.grad,
        running_mean,
        running_var,
    )


def assert_step(actual: Step, layer: Layer, x: Tensor, dy: Tensor) -> None:
    """Compares each part of a step with the oracle; x and dy are those of all ranks together."""
    exact = torch_step(layer, x, dy, torch.float64)
    torchs = torch_step(layer, x, dy, x.dtype)
    for name, ours in vars(actual).items():
        if ours is None:
            assert getattr(exact, name) is None
            continue
        assert_near(name, ours, getattr(exact, name), getattr(torchs, name), x.dtype)


def assert_near(
    name: str, ours: Tensor, exact: Tensor, torchs: Tensor, computed_in: torch.dtype
) -> None:
    """Fails unless ours is within the pass rule, given torch's result in the same dtype."""
    exact = exact.double()
    # fp64 is its own oracle: there, two orders of summation may differ by a few roundings.
    torch_error = (
        16 * torch.finfo(torch.float64).eps * exact.abs().amax()
        if computed_in == torch.float64
        else (torchs.double() - exact).abs().amax()
    )
    ulp = torch.finfo(min((ours.dtype, computed_in), key=_digits)).eps * exact.abs().amax()
    bound = 2 * torch_error + ulp
    error = (ours.double() - exact).abs().amax()
    assert error <= bound, f"{name}: error {error:.3e} above the bound {bound:.3e}"


def _digits(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps
