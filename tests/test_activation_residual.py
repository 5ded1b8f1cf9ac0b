"""A fused residual of any layout or dtype, or the input itself, is added as torch adds it."""

import pytest
import torch
from composed import EVERY, Tensors, outcome, pair
from oracle import Layer
from test_activation import SLOPE, assert_composed, steady
from test_cases_layout import FP64, VIEWS, channels_last, randn, random_layer
from test_parity import build
from torch import Tensor

pytestmark = pytest.mark.usefixtures("aten")


def step_as_laid_out(
    layer: Layer, activation: str | None, x: Tensor, residual: Tensor, dy: Tensor
) -> Tensors:
    """One training step on tensors that nothing has made contiguous before."""
    options = {"num_features": x.shape[1], "dtype": x.dtype, "eps": layer.eps}
    module = build({**options, "activation": activation, "negative_slope": SLOPE}, layer)
    x, residual = x.detach().requires_grad_(), residual.detach().requires_grad_()
    y = module(x, residual)
    inputs = (x, module.weight, module.bias, residual)
    dx, grad_weight, grad_bias, dresidual = torch.autograd.grad(y, inputs, dy.to(y.dtype))
    return {
        "y": y.detach(),
        "dx": dx,
        "grad_weight": grad_weight,
        "grad_bias": grad_bias,
        "running_mean": module.running_mean,
        "running_var": module.running_var,
        "dresidual": dresidual,
    }


def check_step(layer: Layer, activation: str | None, x: Tensor, residual: Tensor) -> Tensors:
    """Compares a step with the oracle."""
    dy = steady(layer, x, residual, torch.randn(x.shape, dtype=x.dtype), activation)
    step = step_as_laid_out(layer, activation, x, residual, dy)
    assert_composed(step, layer, x, residual, dy, activation)
    return step


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_a_residual_of_any_layout(backend: str, name: str, activation: str | None) -> None:
    residual = VIEWS[name]()
    x = randn(*residual.shape)
    check_step(random_layer(x.shape[1]), activation, x, residual)


@pytest.mark.parametrize("name", ["transposed image", "cropped, channels-last", "batch innermost"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_an_input_of_any_layout(backend: str, name: str, activation: str) -> None:
    x = VIEWS[name]()
    check_step(random_layer(x.shape[1]), activation, x, randn(*x.shape))


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_results_have_the_format_of_the_input(backend: str, activation: str | None) -> None:
    layer, plain, last = random_layer(3), randn(2, 3, 4, 5), channels_last(2, 3, 4, 5)
    for x, residual in ((plain, last), (last, plain)):
        step = check_step(layer, activation, x, residual)
        assert step["y"].stride() == step["dx"].stride() == x.stride()


@pytest.mark.parametrize(
    ("dtype", "of_residual"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
@EVERY
def test_a_residual_of_another_dtype(
    backend: str, activation: str | None, dtype: torch.dtype, of_residual: torch.dtype
) -> None:
    """The sum has the dtype that torch promotes the two to, each gradient that of its tensor."""
    x, residual = torch.randn(4, 3, 5).to(dtype), torch.randn(4, 3, 5).to(of_residual)
    layer = random_layer(3)
    for name in ("weight", "bias", "running_mean", "running_var"):
        setattr(layer, name, getattr(layer, name).to(dtype))
    step = check_step(layer, activation, x, residual)
    assert step["y"].dtype == torch.promote_types(dtype, of_residual)
    assert (step["dx"].dtype, step["dresidual"].dtype) == (dtype, of_residual)


@EVERY
def test_the_input_itself_as_residual(backend: str, activation: str | None) -> None:
    ours, composed = pair(activation, dtype=torch.float64)
    x = randn(4, 3, 5)
    right = outcome(lambda x: composed(x, x), composed.norm, x, None)
    torch.testing.assert_close(outcome(lambda x: ours(x, x), ours, x, None), right, **FP64)
