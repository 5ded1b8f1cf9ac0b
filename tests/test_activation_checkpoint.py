"""A layer with an activation takes the same step checkpointed, and counts it once."""

import pytest
import torch
from composed import outcome, pair
from test_cases_layout import FP64, randn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("aten")


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_checkpointed_step_is_as_without(activation: str, use_reentrant: bool) -> None:
    """The running statistics are updated once."""
    ours, composed = pair(activation, dtype=torch.float64)
    x, residual = randn(2, 4, 3, 5)

    def checkpointed(*inputs: Tensor) -> Tensor:
        return checkpoint(ours, *inputs, use_reentrant=use_reentrant)

    actual = outcome(checkpointed, ours, x, residual)
    assert ours.num_batches_tracked == 1
    right = outcome(composed, composed.norm, x, residual)
    torch.testing.assert_close(actual, right, **FP64)
