"""A layer's activation is shown, copied and pickled with it, and is no part of its state."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from test_activation import SLOPE
from torch import nn

from syncbn_triton import SyncBatchNorm

pytestmark = pytest.mark.usefixtures("aten")


def test_representation() -> None:
    assert "activation" not in repr(SyncBatchNorm(3))
    assert repr(SyncBatchNorm(3, activation="silu")).endswith(
        "track_running_stats=True, activation='silu')"
    )
    assert repr(SyncBatchNorm(3, activation="leaky_relu", negative_slope=0.2)).endswith(
        "activation='leaky_relu', negative_slope=0.2)"
    )


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded],
    ids=["copy", "deepcopy", "pickle", "save"],
)
def test_a_duplicate_has_the_activation(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    module = SyncBatchNorm(3, activation="leaky_relu", negative_slope=SLOPE)
    x, residual = torch.randn(2, 4, 3)
    duplicated = duplicate(module)
    assert (duplicated.activation, duplicated.negative_slope) == ("leaky_relu", SLOPE)
    assert torch.equal(duplicated(x, residual), module(x, residual))


def test_a_layer_pickled_before_there_were_activations() -> None:
    module, x = SyncBatchNorm(3), torch.randn(4, 3)
    state = module.__getstate__()
    del state["activation"], state["negative_slope"]
    old = SyncBatchNorm.__new__(SyncBatchNorm)
    old.__setstate__(state)
    assert old.activation is None
    assert torch.equal(old(x), module(x))
    assert repr(old) == repr(module)


def test_state_is_that_of_torchs_layer() -> None:
    torchs, ours = nn.BatchNorm2d(3), SyncBatchNorm(3, activation="silu")
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    nn.init.normal_(torchs.weight)
    ours.load_state_dict(torchs.state_dict(), strict=True)
    torchs.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(ours.state_dict(), torchs.state_dict(), rtol=0, atol=0)
