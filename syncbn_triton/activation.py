"""The activations as torch operators, and their derivatives, differentiable to any order."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels.epilogue import ACTIVATIONS

_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.Hardswish: "hardswish",
}


def check(activation: str | None) -> None:
    """Raises ValueError unless this is an activation that can be fused, or None."""
    if activation is not None and activation not in ACTIVATIONS:
        expected = ", ".join(ACTIVATIONS)
        raise ValueError(
            f"expected activation to be None or one of {expected} (got {activation!r})"
        )


def activate(z: Tensor, activation: str | None, negative_slope: float) -> Tensor:
    """``activation(z)``, as in ``torch.nn.functional``."""
    if activation is None:
        return z
    if activation == "leaky_relu":
        return F.leaky_relu(z, negative_slope)
    result: Tensor = getattr(F, activation)(z)
    return result


def backpropagate(dy: Tensor, z: Tensor, activation: str | None, negative_slope: float) -> Tensor:
    """``dy * activation'(z)``; of a piecewise linear one, z counts by its sign alone."""
    if activation == "relu":
        # Not a product, which would be NaN for an infinite dy.
        return torch.where(z <= 0, 0, dy)
    if activation == "leaky_relu":
        return torch.where(z > 0, dy, dy * negative_slope)
    if activation == "silu":
        s = z.sigmoid()
        return dy * (s + z * s * (1 - s))
    if activation == "gelu":
        density = (-0.5 * z * z).exp() / math.sqrt(2 * math.pi)
        return dy * (0.5 + 0.5 * (z * math.sqrt(0.5)).erf() + z * density)
    if activation == "hardswish":
        inside = torch.where(z >= 3, 1, z / 3 + 0.5)
        return torch.where(z <= -3, 0, dy * inside)
    return dy


def activation_of(module: nn.Module | None) -> tuple[str | None, float] | None:
    """Name and negative slope of an activation module that can be fused, or None.

    The name is None of a module that returns its input.
    """
    if module is None or type(module) is nn.Identity:
        return None, 0.01
    name = _MODULES.get(type(module))
    if name is None or getattr(module, "approximate", "none") != "none":
        return None
    return name, getattr(module, "negative_slope", 0.01)
