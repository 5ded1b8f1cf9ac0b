"""Residuals and activations that do not fit raise before anything is sent or changed."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor

from syncbn_triton import SyncBatchNorm, sync_batch_norm

pytestmark = pytest.mark.usefixtures("aten")


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("residual", "error", "message"),
    [
        (torch.ones(4, 3, 1), ValueError, r"input's shape \(4, 3, 5\) \(got \(4, 3, 1\)\)"),
        (torch.ones(3, 1), ValueError, r"input's shape \(4, 3, 5\) \(got \(3, 1\)\)"),
        (torch.ones(4, 3, 5).long(), NotImplementedError, r"floating dtype \(got torch\.int64\)"),
        (torch.ones(4, 3, 5).bool(), NotImplementedError, r"floating dtype \(got torch\.bool\)"),
        (torch.ones(4, 3, 5, device="meta"), RuntimeError, "cpu and residual on meta"),
    ],
    ids=["broadcast", "fewer dimensions", "integers", "bools", "another device"],
)
def test_a_residual_that_does_not_fit(
    training: bool, residual: Tensor, error: type[Exception], message: str
) -> None:
    module = SyncBatchNorm(3, activation="relu").train(training)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=message):
        module(torch.randn(4, 3, 5), residual)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def raise_before_any_collective(rank: int) -> None:
    module = SyncBatchNorm(3, activation="relu")
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=re.escape("(2, 3, 4) (got (2, 3, 1))")):
        module(torch.randn(2, 3, 4), torch.randn(2, 3, 1))
    module.activation = "tanh"
    with pytest.raises(ValueError, match="got 'tanh'"):
        module(torch.randn(2, 3, 4))
    assert dist.group.WORLD._get_sequence_number_for_group() == 0
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_nothing_is_communicated_or_changed_before_an_error(ranks: RankPool) -> None:
    ranks.run(2, raise_before_any_collective)


@pytest.mark.parametrize("activation", ["tanh", "ReLU", "", "none"])
def test_an_unknown_activation(activation: str) -> None:
    message = re.escape(
        "expected activation to be None or one of relu, leaky_relu, silu, gelu, hardswish "
        f"(got {activation!r})"
    )
    with pytest.raises(ValueError, match=message):
        SyncBatchNorm(3, activation=activation)
    for training in (True, False):
        arguments = (torch.randn(4, 3), torch.zeros(3), torch.ones(3))
        with pytest.raises(ValueError, match=message):
            sync_batch_norm(*arguments, training=training, activation=activation)
