"""Activations and sums that a forward calls as functions are fused, whatever their spelling."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fusible import Functional, assert_same, converted, images, step
from torch import Tensor

from syncbn_triton import convert_sync_batchnorm, fuse_activations

pytestmark = pytest.mark.usefixtures("aten")


TAILS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, bool]] = {
    "F.relu": (lambda y, x: F.relu(y), "relu", False),
    "F.relu in place": (lambda y, x: F.relu(y, inplace=True), "relu", False),
    "F.relu_": (lambda y, x: F.relu_(y), "relu", False),
    "torch.relu": (lambda y, x: torch.relu(y), "relu", False),
    "torch.relu_": (lambda y, x: torch.relu_(y), "relu", False),
    "relu": (lambda y, x: y.relu(), "relu", False),
    "relu_": (lambda y, x: y.relu_(), "relu", False),
    "F.leaky_relu": (lambda y, x: F.leaky_relu(y, 0.2, True), "leaky_relu", False),
    "F.leaky_relu default": (lambda y, x: F.leaky_relu(input=y), "leaky_relu", False),
    "F.leaky_relu_": (lambda y, x: F.leaky_relu_(y, negative_slope=0.2), "leaky_relu", False),
    "F.silu": (lambda y, x: F.silu(y), "silu", False),
    "F.gelu": (lambda y, x: F.gelu(y), "gelu", False),
    "F.hardswish": (lambda y, x: F.hardswish(y, inplace=True), "hardswish", False),
    "+": (lambda y, x: F.relu(y + x), "relu", True),
    "+ from the right": (lambda y, x: F.silu(x + y), "silu", True),
    "torch.add": (lambda y, x: F.gelu(torch.add(x, other=y, alpha=1)), "gelu", True),
    "add": (lambda y, x: F.hardswish(x.add(y)), "hardswish", True),
    "add_": (lambda y, x: F.leaky_relu(y.add_(x), 0.2), "leaky_relu", True),
    "a row": (lambda y, x: F.relu(y + x[:, :, :1]), "relu", True),
    "a row in place": (lambda y, x: F.relu(y.add_(x[:, :, :1])), "relu", True),
    "a number": (lambda y, x: F.relu(y + x.shape[0]), "relu", True),
    "another dtype": (lambda y, x: F.silu(y + x.float()), "silu", True),
    "another dtype in place": (lambda y, x: F.silu(y.add_(x.float())), "silu", True),
    "integers": (lambda y, x: F.silu(y + x.long()), "silu", True),
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_functions(tail: str, dtype: torch.dtype) -> None:
    """Also sums that broadcast or mix dtypes, which are computed as before."""
    function, activation, residual = TAILS[tail]
    model, x = converted(Functional(function)).to(dtype), images(dtype=dtype)
    right = step(copy.deepcopy(model), x)
    (row,) = fuse_activations(model).layers
    assert (row.activation, row.residual, row.reason) == (activation, residual, None)
    ours = step(model, x)
    assert {name: t.dtype for name, t in ours.items()} == {
        name: t.dtype for name, t in right.items()
    }
    if dtype == torch.float64:
        assert_same(ours, right)
    else:
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-4)


def test_what_a_sum_in_place_of_two_dtypes_returns() -> None:
    """As under autocast: half from a convolution, single from the layer before."""
    model = convert_sync_batchnorm(Functional(lambda y, x: F.relu(y.add_(x.float()))))
    x = images(dtype=torch.bfloat16)
    model.conv.to(torch.bfloat16)
    right = copy.deepcopy(model)(x)
    assert fuse_activations(model).fused
    assert model(x).dtype == right.dtype == torch.bfloat16
    assert torch.equal(model(x), right)
