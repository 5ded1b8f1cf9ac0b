"""timm's layer, which has an activation of its own, converts with it and reverts."""

import copy

import pytest
from fusible import assert_same, images, step, with_hook
from torch import Tensor, nn

from syncbn_triton import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    fuse_activations,
    revert_sync_batchnorm,
    unfuse_activations,
)

pytestmark = pytest.mark.usefixtures("aten")


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's."""

    def __init__(self, C: int, act: nn.Module | None, drop: nn.Module | None = None) -> None:
        super().__init__(C)
        self.drop, self.act = drop or nn.Identity(), act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class DoesMore(BatchNormAct2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("act", "activation"),
    [
        (nn.ReLU(inplace=True), "relu"),
        (nn.LeakyReLU(0.2), "leaky_relu"),
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.Hardswish(), "hardswish"),
        (None, None),
    ],
    ids=str,
)
def test_timms_layer_converts_with_its_activation(
    act: nn.Module | None, activation: str | None
) -> None:
    model, x = nn.Sequential(BatchNormAct2d(3, act)).double(), images()
    right, before = step(copy.deepcopy(model), x), vars(model[0]).copy()
    convert_sync_batchnorm(model)
    assert type(model[0]) is SyncBatchNorm
    assert model[0].activation == activation
    assert_same(step(copy.deepcopy(model), x), right)
    revert_sync_batchnorm(model)
    assert type(model[0]) is BatchNormAct2d
    assert vars(model[0]) == before
    assert_same(step(model, x), right)


def hooked_relu() -> nn.Module:
    with_hook(relu := nn.ReLU())
    return relu


@pytest.mark.parametrize(
    "layer",
    [
        BatchNormAct2d(3, nn.ReLU(), nn.Dropout2d(0.1)),
        BatchNormAct2d(3, nn.ReLU6()),
        BatchNormAct2d(3, nn.GELU(approximate="tanh")),
        BatchNormAct2d(3, hooked_relu()),
        DoesMore(3, nn.ReLU()),
    ],
    ids=str,
)
def test_timms_layers_that_are_left_alone(layer: nn.Module) -> None:
    with pytest.warns(UserWarning, match="has a forward of its own"):
        assert convert_sync_batchnorm(layer) is layer


def test_an_activation_fused_after_timms_layer_does_not_revert() -> None:
    model = convert_sync_batchnorm(nn.Sequential(BatchNormAct2d(3, None), nn.ReLU()))
    assert fuse_activations(model).fused
    with pytest.raises(ValueError, match="unfuse_activations first"):
        revert_sync_batchnorm(model)
    assert type(revert_sync_batchnorm(unfuse_activations(model))[0]) is BatchNormAct2d
