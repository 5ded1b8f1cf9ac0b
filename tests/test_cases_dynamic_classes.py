"""Users' cases: conversion of layers whose class torch itself changes, lazy and parametrized."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_cases_layout import FP64, randn
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm

from syncbn_triton import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")

LAZY = {
    nn.LazyBatchNorm1d: (nn.BatchNorm1d, (4, 3, 5)),
    nn.LazyBatchNorm2d: (nn.BatchNorm2d, (4, 3, 2, 3)),
    nn.LazyBatchNorm3d: (nn.BatchNorm3d, (4, 3, 2, 2, 2)),
}


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}], ids=str)
@pytest.mark.parametrize("lazy", LAZY)
def test_v6_lazy_until_the_first_input(lazy: type[nn.Module], options: dict[str, Any]) -> None:
    plain, size = LAZY[lazy]
    model, x = convert_sync_batchnorm(nn.Sequential(lazy(**options))), torch.randn(size)
    assert isinstance(model[0], SyncBatchNorm)
    assert model[0].has_uninitialized_params()
    torchs = plain(3, **options)
    torch.testing.assert_close(model(x), torchs(x))
    assert type(model[0]) is SyncBatchNorm
    torch.testing.assert_close(model[0].state_dict(), torchs.state_dict())
    assert type(revert_sync_batchnorm(model)[0]) is plain


def test_v6_lazy_reverted_before_the_first_input() -> None:
    model = revert_sync_batchnorm(convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d())))
    assert type(model[0]) is nn.LazyBatchNorm2d
    model(torch.randn(2, 3, 4, 4))
    assert type(model[0]) is nn.BatchNorm2d


def test_v6_lazy_to_a_subclass_and_converted_again() -> None:
    class Ours(SyncBatchNorm):
        pass

    model = convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d()))
    Ours.convert_sync_batchnorm(model)
    assert model[0].has_uninitialized_params()
    model(torch.randn(2, 3, 4, 4))
    assert type(model[0]) is Ours


def test_v6_lazy_takes_its_size_from_a_state_dict() -> None:
    source = nn.Sequential(nn.BatchNorm2d(3))
    source(torch.randn(2, 3, 4, 4))
    model = convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d()))
    model.load_state_dict(source.state_dict())
    torch.testing.assert_close(model.state_dict(), source.state_dict(), rtol=0, atol=0)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(model.eval()(x), source.eval()(x))
    assert type(model[0]) is SyncBatchNorm


def test_v6_lazy_is_saved_as_torchs_is() -> None:
    file = io.BytesIO()
    torch.save(convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm2d())), file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    model(torch.randn(2, 3, 4, 4))
    assert type(model[0]) is SyncBatchNorm


class Doubled(nn.Module):
    def forward(self, original: Tensor) -> Tensor:
        return 2 * original

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2


def doubled(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Doubled())


def both_doubled(layer: nn.Module) -> None:
    doubled(layer)
    parametrize.register_parametrization(layer, "bias", Doubled())


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], object]] = {
    "weight": doubled,
    "weight and bias": both_doubled,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "spectral_norm by hooks": spectral_norm,
}


def step(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    layer.zero_grad()
    y = layer(x)
    y.tanh().sum().backward()
    gradients = {f"grad_{name}": p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), **gradients, **layer.state_dict()}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_v2_parametrized(name: str) -> None:
    """Trains as the unconverted layer, when converted and when reverted."""
    torchs = nn.BatchNorm1d(3).double()
    nn.init.normal_(torchs.weight)
    PARAMETRIZATIONS[name](torchs)
    model, original = nn.Sequential(copy.deepcopy(torchs)), type(torchs).__name__
    for change in (convert_sync_batchnorm, convert_sync_batchnorm, revert_sync_batchnorm):
        change(model)
        x = randn(4, 3, 2)
        expected = step(torchs, x)
        torch.testing.assert_close(step(model[0], x), expected, **FP64)
    assert type(model[0]).__name__ == original


def test_v2_a_converted_parametrized_layer_is_copied() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    doubled(model[0])
    model, x = convert_sync_batchnorm(model).eval(), torch.randn(4, 3)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))
    nn.init.zeros_(copied[0].parametrizations.weight.original)
    assert not torch.equal(copied(x), model(x))


def test_v2_parametrized_layers_are_not_pickled() -> None:
    """The error is torch's own, which tells what to do instead."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    doubled(model[0])
    for change in (lambda model: model, convert_sync_batchnorm, revert_sync_batchnorm):
        with pytest.raises(RuntimeError, match="only supported through state_dict"):
            torch.save(change(model), io.BytesIO())


@pytest.mark.parametrize("convert_first", [False, True], ids=["before", "after"])
def test_v2_parametrization_removed_while_converted(convert_first: bool) -> None:
    """Whether it was registered before the conversion or after, the plain class comes back."""
    model, x = nn.Sequential(nn.BatchNorm1d(3)).eval(), torch.randn(4, 3)
    nn.init.normal_(model[0].weight)
    y = model(x)
    if convert_first:
        convert_sync_batchnorm(model)
        doubled(model[0])
    else:
        doubled(model[0])
        convert_sync_batchnorm(model)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is SyncBatchNorm
    assert torch.equal(model(x), y)
    revert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d
    assert torch.equal(model(x), y)


def test_v2_parametrization_removed_after_the_way_back() -> None:
    """Registered in part before and in part after the conversion."""
    model, x = nn.Sequential(nn.BatchNorm1d(3)).eval(), torch.randn(4, 3)
    y = model(x)
    doubled(model[0])
    convert_sync_batchnorm(model)
    parametrize.register_parametrization(model[0], "bias", Doubled())
    revert_sync_batchnorm(model)
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(model[0], name)
    assert type(model[0]) is nn.BatchNorm1d
    assert torch.equal(model(x), y)
