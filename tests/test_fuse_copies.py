"""Copies of a fused model are fused as it is, and are undone on their own."""

import copy
import io

import pytest
import torch
from fusible import NETWORKS, converted, images, step

from syncbn_triton import fuse_activations, unfuse_activations

pytestmark = pytest.mark.usefixtures("aten")


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_copies(network: str, how: str) -> None:
    """They are fused as the original is, and are undone on their own."""
    model, x = converted(NETWORKS[network][0]()), images()
    unfused = step(copy.deepcopy(model), x)
    fuse_activations(model)
    types = [type(module) for module in model.modules()]
    if how == "copied":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    right = step(copy.deepcopy(model), x)
    assert [type(module) for module in other.modules()] == types
    assert not fuse_activations(other).fused
    ours = step(other, x)
    assert all(torch.equal(ours[name], right[name]) for name in right)
    unfuse_activations(other)
    assert [type(module) for module in model.modules()] == types
    other.load_state_dict(model.state_dict())
    ours = step(other, x)
    assert all(torch.equal(ours[name], unfused[name]) for name in unfused)
