"""Fusing is undone without a trace, and has to be before a model is reverted."""

import copy

import pytest
import torch
from fusible import NETWORKS, ResNet, converted, images, step
from torch import nn

from syncbn_triton import SyncBatchNorm, fuse_activations, revert_sync_batchnorm, unfuse_activations

pytestmark = pytest.mark.usefixtures("aten")


@pytest.mark.parametrize("network", NETWORKS)
def test_fusing_twice_and_undoing(network: str) -> None:
    model, x = converted(NETWORKS[network][0]()), images()
    untouched = copy.deepcopy(model)
    modules = dict(model.named_modules())
    types = {name: type(module) for name, module in modules.items()}
    attributes = {name: vars(module).copy() for name, module in modules.items()}
    right = step(untouched, x)
    fuse_activations(model)
    fused = {name: type(module) for name, module in model.named_modules()}
    assert fused != types
    assert not fuse_activations(model).fused
    assert {name: type(module) for name, module in model.named_modules()} == fused
    for _ in range(2):
        assert unfuse_activations(model) is model
        found = dict(model.named_modules())
        assert found.keys() == modules.keys()
        assert all(found[name] is module for name, module in modules.items())
        assert {name: type(module) for name, module in found.items()} == types
        assert {name: vars(module) for name, module in found.items()} == attributes
    ours = step(model, x)
    assert all(torch.equal(ours[name], right[name]) for name in right)


def test_a_fused_layer_does_not_revert() -> None:
    model, x = converted(ResNet()), images()
    fuse_activations(model)
    with pytest.raises(ValueError, match=r"got 'relu' in bn1.*unfuse_activations first"):
        revert_sync_batchnorm(model)
    assert all(type(m) is not nn.BatchNorm2d for m in model.modules())
    model(x)
    revert_sync_batchnorm(unfuse_activations(model))
    assert type(model.bn1) is type(model.layer1[0].bn3) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="got 'silu' in the layer"):
        revert_sync_batchnorm(SyncBatchNorm(3, activation="silu"))
