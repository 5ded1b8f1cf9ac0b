"""Users' cases: conversion of models, and back."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm

# Each plain class, and the size of an input for it.
PLAIN = {
    nn.BatchNorm1d: (4, 3, 5),
    nn.BatchNorm2d: (4, 3, 2, 3),
    nn.BatchNorm3d: (4, 3, 2, 2, 2),
}


class WithActivation(nn.BatchNorm2d):
    """A forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class OfWithActivation(WithActivation):
    """The forward of its parent, which is not torch's."""


class OfTorchsSynchronized(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Named(nn.BatchNorm2d):
    """torch's forward, and nothing that conversion could lose."""

    def __init__(self, name: str, C: int) -> None:
        super().__init__(C)
        self.name = name


class OursWithActivation(SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize("layer", [WithActivation, OfWithActivation, OfTorchsSynchronized])
def test_v1_a_forward_of_its_own_is_left_alone(layer: type[nn.Module]) -> None:
    """pytorch#187298, timm#1254."""
    model, x = nn.Sequential(layer(3), nn.Sequential(layer(3))).eval(), torch.randn(2, 3, 4, 4)
    y, layers = model(x), list(model.modules())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        convert_sync_batchnorm(model)
    (warning,) = caught
    assert f"{layer.__qualname__} has a forward of its own" in str(warning.message)
    assert list(model.modules()) == layers
    assert torch.equal(model(x), y)


def test_v1_a_subclass_with_torchs_forward_is_converted() -> None:
    model, x = nn.Sequential(Named("stem", 3)).eval(), torch.randn(2, 3, 4, 4)
    y = model(x)
    convert_sync_batchnorm(model)
    assert type(model[0]) is SyncBatchNorm
    assert model[0].name == "stem"
    assert torch.equal(model(x), y)
    assert type(revert_sync_batchnorm(model)[0]) is Named


def test_v1_a_forward_set_on_the_object_is_left_alone() -> None:
    """As wrappers set that cast the output or move a layer between devices."""
    model, x = nn.Sequential(nn.BatchNorm2d(3)), torch.randn(2, 3, 4, 4)
    forward = model[0].forward
    model[0].forward = lambda input: forward(input).relu()
    with pytest.warns(UserWarning, match="has a forward of its own"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
    assert (model(x) >= 0).all()


def test_v1_a_subclass_of_ours_keeps_its_forward() -> None:
    model, x = nn.Sequential(OursWithActivation(3)).eval(), torch.randn(2, 3, 4, 4)
    y = model(x)
    convert_sync_batchnorm(model)
    assert type(model[0]) is OursWithActivation
    assert torch.equal(model(x), y)


@pytest.mark.parametrize("layer", [nn.InstanceNorm2d(3, affine=True), nn.GroupNorm(1, 3)], ids=str)
def test_v1_other_normalizations_are_left_alone(layer: nn.Module) -> None:
    assert convert_sync_batchnorm(layer) is layer


def save_and_step(layer: nn.Module) -> None:
    """Calls every kind of hook once."""
    layer(torch.randn(4, 3, 5).requires_grad_()).sum().backward()
    layer.load_state_dict(layer.state_dict())


HOOKS = [
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
]


@pytest.mark.parametrize("register", HOOKS)
def test_v2_hooks(register: str) -> None:
    """They are called with the layer that now stands in the model, until they are removed."""
    model, seen = nn.Sequential(nn.BatchNorm1d(3)), []
    handle = getattr(model[0], register)(lambda module, *_: seen.append(module))
    convert_sync_batchnorm(model)
    save_and_step(model[0])
    assert seen == [model[0]]
    revert_sync_batchnorm(model)
    save_and_step(model[0])
    assert seen[1:] == [model[0]]
    handle.remove()
    save_and_step(model[0])
    assert len(seen) == 2


def test_v2_hooks_with_keywords() -> None:
    layer, seen = nn.BatchNorm1d(3), []
    layer.register_forward_pre_hook(lambda m, a, k: seen.append(set(k)), with_kwargs=True)
    convert_sync_batchnorm(layer)(input=torch.randn(4, 3))
    assert seen == [{"input"}]


def test_v2_attributes_buffers_parameters_and_children() -> None:
    layer = nn.BatchNorm1d(3)
    layer.note = ["anything"]
    layer.register_buffer("kept", torch.ones(2))
    layer.register_buffer("not_saved", torch.ones(2), persistent=False)
    layer.gain = nn.Parameter(torch.ones(()))
    layer.inner = nn.Sequential(nn.BatchNorm1d(3))
    note, keys = layer.note, list(layer.state_dict())
    tensors = dict([*layer.named_parameters(), *layer.named_buffers()])
    converted = convert_sync_batchnorm(layer)
    assert type(converted.inner[0]) is SyncBatchNorm
    reverted = revert_sync_batchnorm(converted)
    for changed in (converted, reverted):
        assert changed.note is note
        assert list(changed.state_dict()) == keys
        found = dict([*changed.named_parameters(), *changed.named_buffers()])
        assert found.keys() == tensors.keys()
        assert all(found[name] is tensor for name, tensor in tensors.items())


class Pair(nn.Module):
    """One layer under two names, and in a child."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = self.second = norm
        self.child = nn.ModuleList([norm, nn.Sequential(norm)])


@pytest.mark.parametrize("original", PLAIN)
def test_v3_one_layer_under_several_names(original: type[nn.Module]) -> None:
    model = Pair(original(3))
    for change, expected in (
        (convert_sync_batchnorm, SyncBatchNorm),
        (convert_sync_batchnorm, SyncBatchNorm),
        (revert_sync_batchnorm, original),
    ):
        assert change(model) is model
        assert type(model.first) is expected
        assert model.first is model.second is model.child[0] is model.child[1][0]


def test_v3_modules_that_hold_each_other() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model[0].owner = model
    convert_sync_batchnorm(model)
    assert type(model[0]) is SyncBatchNorm
    assert model[0].owner is model


@pytest.mark.parametrize("change_back", [False, True], ids=["converted", "reverted"])
def test_v4_an_optimizer_built_before(change_back: bool) -> None:
    """CenterPoint#146."""
    model, plain = (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    convert_sync_batchnorm(model)
    if change_back:
        revert_sync_batchnorm(model)
    for _ in range(3):
        x = torch.randn(4, 3)
        for trained, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            trained(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


FLAGS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"affine": False},
    {"track_running_stats": False},
    {"eps": 0.5, "momentum": None},
    {"device": "meta"},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16, "device": "meta", "bias": False},
]


@pytest.mark.parametrize("options", FLAGS, ids=str)
@pytest.mark.parametrize("original", [*PLAIN, nn.SyncBatchNorm])
def test_v5_flags(original: type[nn.Module], options: dict[str, Any]) -> None:
    """pytorch#111998."""
    layer = original(3, **options).eval().requires_grad_(False)
    layer.qconfig = object()
    before = vars(layer).copy()
    converted = convert_sync_batchnorm(layer)
    assert vars(converted) == {"process_group": None, **before, "converted_from": original}
    assert repr(converted) == repr(nn.SyncBatchNorm(3, **options))
    reverted = revert_sync_batchnorm(converted)
    assert type(reverted) is original
    assert vars(reverted) == before


def test_v7_a_subclass_takes_over_what_was_converted_before() -> None:
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3)))
    OursWithActivation.convert_sync_batchnorm(model)
    assert [type(layer) for layer in model] == [OursWithActivation] * 2
    revert_sync_batchnorm(model)
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, nn.SyncBatchNorm]


def convert_with_groups(rank: int) -> None:
    """The group of torch's class comes along and goes back; a new one reaches every layer."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    model = nn.Sequential(nn.SyncBatchNorm(3, process_group=first), nn.BatchNorm1d(3))
    convert_sync_batchnorm(model)
    assert [layer.process_group for layer in model] == [first, None]
    OursWithActivation.convert_sync_batchnorm(model, second)
    assert [layer.process_group for layer in model] == [second, second]
    convert_sync_batchnorm(revert_sync_batchnorm(model))
    assert [layer.process_group for layer in model] == [second, None]


def test_v7_groups(ranks: RankPool) -> None:
    ranks.run(2, convert_with_groups)


@pytest.mark.parametrize("original", PLAIN)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"affine": False}, {"momentum": None}])
def test_v8_there_and_back(original: type[nn.Module], options: dict[str, Any]) -> None:
    """pytorch#41081."""
    x = torch.randn(PLAIN[original])
    model = nn.Sequential(original(3, **options), nn.Sequential(original(3, **options).eval()))
    untouched = nn.Sequential(original(3, **options), nn.Sequential(original(3, **options).eval()))
    untouched.load_state_dict(model.state_dict())
    convert_sync_batchnorm(model)
    assert list(model.state_dict()) == list(untouched.state_dict())
    torch.testing.assert_close(model(x), untouched(x))
    torch.testing.assert_close(model.state_dict(), untouched.state_dict())
    revert_sync_batchnorm(model)
    untouched.load_state_dict(model.state_dict())
    assert [type(m) for m in model.modules()] == [type(m) for m in untouched.modules()]
    assert [m.training for m in model.modules()] == [m.training for m in untouched.modules()]
    assert torch.equal(model(x), untouched(x))
