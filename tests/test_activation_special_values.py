"""At kinks and of special values, a fused activation and its derivative are torch's."""

import math
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from composed import outcome, pair
from syncbn_triton.kernels import activation as kernels
from syncbn_triton.kernels.epilogue import ACTIVATIONS
from test_activation import SLOPE, activate
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm
from syncbn_triton.activation import activate as activate_by_aten
from syncbn_triton.activation import backpropagate as backpropagate_by_aten

pytestmark = pytest.mark.usefixtures("aten")


SPECIAL = [0.0, -0.0, 3.0, -3.0, 2.9999998, -2.9999998, 3.0000002, -3.0000002, 1e-30, -1e-30]
SPECIAL += [math.inf, -math.inf, math.nan, 88.0, -88.0, 100.0, -100.0, 1e20, -1e20]
SAME = {"rtol": 1e-6, "atol": 1e-6, "equal_nan": True}


@triton.jit
def activation_kernel(
    z_ptr,
    dy_ptr,
    y_ptr,
    dz_ptr,
    n,
    negative_slope: tl.float64,
    A: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.arange(0, BLOCK)
    z = tl.load(z_ptr + offs, mask=offs < n, other=0.0)
    dy = tl.load(dy_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, kernels.activate(z, negative_slope, A), mask=offs < n)
    dz = kernels.backpropagate(dy, z, negative_slope, A)
    tl.store(dz_ptr + offs, dz, mask=offs < n)


def well_defined(z: Tensor, activation: str) -> Tensor:
    """Where torch's own result is one, whatever part of a vector register an element lies in.

    The derivative of `hardswish` at NaN is 1 or NaN, `gelu` of infinity is that or NaN, and that of
    `silu` is 0 where it should be subnormal.
    """
    if activation == "hardswish":
        return ~z.isnan()
    unlike = {"gelu": math.inf, "silu": -100.0}.get(activation)
    return torch.ones_like(z, dtype=torch.bool) if unlike is None else z != unlike


def by_kernel(z: Tensor, dy: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    y, dz = torch.empty_like(z), torch.empty_like(z)
    activation_kernel[(1,)](z, dy, y, dz, z.numel(), SLOPE, activation, BLOCK=32)
    return y, dz


def by_aten(z: Tensor, dy: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return (
        activate_by_aten(z, activation, SLOPE),
        backpropagate_by_aten(dy, z, activation, SLOPE),
    )


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("dy", [-0.5, 0.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("function", [by_aten, by_kernel])
def test_values_and_derivatives_at_kinks_and_of_special_values(
    function: Callable[..., tuple[Tensor, Tensor]], activation: str, dtype: torch.dtype, dy: float
) -> None:
    z = torch.tensor(SPECIAL, dtype=dtype, requires_grad=True)
    dy = torch.full_like(z, dy)
    y, dz = function(z.detach(), dy, activation)
    right = activate(z, activation)
    right.backward(dy)
    known = well_defined(z.detach(), activation)
    torch.testing.assert_close(y[known], right.detach()[known], **SAME)
    torch.testing.assert_close(dz[known], z.grad[known], **SAME)
    if activation == "leaky_relu":
        assert torch.equal(y.signbit(), right.signbit())


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dy", [1.0, math.inf])
def test_special_values_of_the_residual(backend: str, activation: str, dy: float) -> None:
    """With a weight of 0 they are the activation's argument, in the forward and the backward."""
    options = {"activation": activation, "negative_slope": SLOPE}
    ours, composed = SyncBatchNorm(1, **options), nn.BatchNorm1d(1)
    for module in (ours, composed):
        nn.init.zeros_(module.weight)
    x = torch.randn(len(SPECIAL), 1)
    residual, other = (torch.tensor(SPECIAL).unsqueeze(1).requires_grad_() for _ in range(2))
    y, right = ours(x, residual), activate(composed(x) + other, activation)
    for result in (y, right):
        result.backward(torch.full_like(result, dy))
    known = well_defined(other.detach(), activation)
    torch.testing.assert_close(y.detach()[known], right.detach()[known], **SAME)
    torch.testing.assert_close(residual.grad[known], other.grad[known], **SAME)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_infinite_input_spoils_its_channel_alone(backend: str, activation: str) -> None:
    ours, composed = pair(activation)
    x = torch.randn(4, 3, 5)
    x[1, 1, 1] = math.inf
    actual, right = outcome(ours, ours, x, None), outcome(composed, composed.norm, x, None)
    for name in ("y", "dx"):
        assert torch.equal(actual[name].isfinite(), right[name].isfinite())
