"""What a fused residual and activation stand for: torch's layer, the sum, the activation."""

from typing import Any

import pytest
from syncbn_triton.kernels.epilogue import ACTIVATIONS
from test_activation import SLOPE, activate
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm

Tensors = dict[str, Tensor]
EVERY = pytest.mark.parametrize("activation", [None, *ACTIVATIONS])


class Composed(nn.Module):
    """Torch's layer, then the sum, then the activation."""

    def __init__(self, activation: str | None, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, **options)
        self.norm._check_input_dim = lambda input: None
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        return activate(y if residual is None else y + residual, self.activation)


def pair(activation: str | None, **options: Any) -> tuple[SyncBatchNorm, Composed]:
    """A layer of ours and torch's composition, in the same state."""
    composed = Composed(activation, **options)
    for tensor in (composed.norm.weight, composed.norm.bias, composed.norm.running_mean):
        nn.init.normal_(tensor)
    ours = SyncBatchNorm(3, activation=activation, negative_slope=SLOPE, **options)
    ours.load_state_dict(composed.norm.state_dict())
    return ours, composed


def outcome(module: nn.Module, layer: nn.Module, x: Tensor, residual: Tensor | None) -> Tensors:
    """Results of a step whose loss is not linear, and the state of the layer after it."""
    x = x.detach().requires_grad_()
    inputs = [x] if residual is None else [x, residual.detach().requires_grad_()]
    layer.zero_grad()
    y = module(*inputs)
    y.tanh().sum().backward()
    gradients = {f"grad_{name}": p.grad for name, p in layer.named_parameters()}
    of_inputs = {name: t.grad for name, t in zip(("dx", "dresidual"), inputs, strict=False)}
    return {"y": y.detach(), **of_inputs, **gradients, **layer.state_dict()}
