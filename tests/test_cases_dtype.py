"""Users' cases: dtypes of input, parameters and buffers, and autocast."""

from typing import Any

import pytest
import torch
from oracle import Layer, Step, assert_step
from syncbn_triton.kernels.results import accumulator_dtype
from test_parity import build, step_on_rank
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OF_INPUT = pytest.mark.parametrize("dtype", DTYPES, ids=str)
OF_PARAMETERS = pytest.mark.parametrize("parameters", [*DTYPES, None], ids=str)


def layer_of(parameters: torch.dtype | None) -> tuple[dict[str, Any], Layer]:
    """A layer with parameters and buffers of a dtype, or without any."""
    if parameters is None:
        options = {"num_features": 5, "affine": False, "track_running_stats": False}
        return options, Layer(None, None, None, None)
    positive, any_sign = (torch.rand(2, 5) + 0.5).to(parameters), torch.randn(2, 5).to(parameters)
    options = {"num_features": 5, "dtype": parameters}
    return options, Layer(positive[0], any_sign[0], any_sign[1], positive[1])


def assert_computed_in_fp32_or_better(step: Step, layer: Layer, x: Tensor, dy: Tensor) -> None:
    """The bounds are those of the accumulator's dtype, and one ulp of what a result is stored in.

    An ulp alone could not tell: bf16 has three digits, and so has a variance summed in bf16.
    """
    accumulator = accumulator_dtype(x)
    assert_step(step, layer, x.to(accumulator), dy.to(accumulator))


@OF_INPUT
@OF_PARAMETERS
def test_l6_training(backend: str, dtype: torch.dtype, parameters: torch.dtype | None) -> None:
    """pytorch#96203, apex#254."""
    options, layer = layer_of(parameters)
    x, dy = torch.randn(6, 5, 4).to(dtype), torch.randn(6, 5, 4).to(dtype)
    result = step_on_rank(0, options, layer, [x], [dy], torch.contiguous_format)
    for name in ("grad_weight", "grad_bias", "running_mean", "running_var"):
        assert result[name] is None or result[name].dtype == parameters
    assert result.pop("num_batches_tracked") == (None if parameters is None else 1)
    assert_computed_in_fp32_or_better(Step(**result), layer, x, dy)


@OF_INPUT
@OF_PARAMETERS
def test_l6_evaluation(dtype: torch.dtype, parameters: torch.dtype | None) -> None:
    options, layer = layer_of(parameters)
    x = torch.randn(6, 5, 4).to(dtype).requires_grad_()
    y = build(options, layer).eval()(x)
    y.backward(torch.ones_like(y))
    assert y.dtype == x.grad.dtype == dtype
    channels = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
    exact = nn.functional.batch_norm(
        x.detach().double(),
        *(None if t is None else t.double() for t in channels),
        training=parameters is None,
    )
    # Rounded to the input's dtype once; fp32 arithmetic costs a few of its own ulps before.
    computed_in = torch.finfo(accumulator_dtype(x))
    bound = exact.abs().amax() * (torch.finfo(dtype).eps / 2 + 8 * computed_in.eps)
    assert (y.double() - exact).abs().amax() <= bound


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_l6_autocast(dtype: torch.dtype, training: bool) -> None:
    """A layer gets what the convolution before it returns, and keeps its own state in fp32."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), SyncBatchNorm(5), nn.ReLU()).train(training)
    exact = nn.BatchNorm2d(5).double().train(training)
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.extend((*inputs, output)))
    with torch.autocast("cpu", dtype=dtype):
        y = model(torch.randn(4, 3, 8, 8))
        assert model[1](torch.randn(4, 5, 3, 3)).dtype == torch.float32
    y.float().square().mean().backward()
    x, normalized = seen[:2]
    assert x.dtype == normalized.dtype == y.dtype == dtype
    assert (normalized.double() - exact(x.double())).abs().amax() <= 4 * torch.finfo(dtype).eps
    for parameter in model.parameters():
        assert parameter.grad.dtype == parameter.dtype == torch.float32
        assert parameter.grad.isfinite().all()


def test_l6_autocast_updates_the_buffers_in_fp32(backend: str) -> None:
    """As does the layer without autocast on the same half-precision input."""
    inside, outside = SyncBatchNorm(5), SyncBatchNorm(5)
    x = torch.randn(4, 5, 6).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = inside(x)
    assert torch.equal(y, outside(x))
    for name, value in outside.state_dict().items():
        assert torch.equal(inside.state_dict()[name], value)
