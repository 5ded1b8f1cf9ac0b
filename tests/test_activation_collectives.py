"""A fused residual and activation add no collective, whichever gradients a rank needs."""

import pytest
import torch
import torch.distributed as dist
from composed import Composed, Tensors, outcome
from ranks import RankPool
from syncbn_triton.kernels.epilogue import ACTIVATIONS
from test_activation import CASES, SLOPE
from test_cases_layout import FP64, randn
from torch import Tensor

from syncbn_triton import SyncBatchNorm


def count_collectives(rank: int, training: bool) -> list[int]:
    """Collectives of one forward and backward for each case, by torch's counter of the group."""
    counts = []
    for activation, added in CASES:
        module = SyncBatchNorm(3, activation=activation).train(training)
        x, residual = torch.randn(2, 2, 3, 4, requires_grad=True)
        before = dist.group.WORLD._get_sequence_number_for_group()
        module(x, residual if added else None).sum().backward()
        counts.append(dist.group.WORLD._get_sequence_number_for_group() - before)
    return counts


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_one_collective_in_each_direction_and_none_in_evaluation(
    ranks: RankPool, training: bool
) -> None:
    assert ranks.run(2, count_collectives, training) == [[2 * training] * len(CASES)] * 2


def step_where_one_residual_needs_a_gradient(
    rank: int, xs: list[Tensor], residuals: list[Tensor], of_input: bool, create_graph: bool
) -> list[Tensors]:
    """Rank 0 needs the residual's gradient, and rank 1 none of its inputs' or the input's."""
    results = []
    for activation in (None, *ACTIVATIONS):
        module = SyncBatchNorm(3, activation=activation, negative_slope=SLOPE).double()
        x = xs[rank].detach().requires_grad_(rank == 0 or of_input)
        residual = residuals[rank].detach().requires_grad_(rank == 0)
        y = module(x, residual)
        leaves = [t for t in (module.weight, x, residual) if t.requires_grad]
        _, *gradients = torch.autograd.grad(y.tanh().sum(), leaves, create_graph=create_graph)
        results.append(dict(zip(("dx", "dresidual"), map(Tensor.detach, gradients), strict=False)))
    return results


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "create_graph"])
@pytest.mark.parametrize("of_input", [False, True], ids=["no input", "input"])
def test_one_rank_needs_no_gradient_of_its_residual(
    ranks: RankPool, of_input: bool, create_graph: bool
) -> None:
    split, (x, residual) = (2, 3), randn(2, 5, 3, 2)
    shares = (x.split(split), residual.split(split))
    arguments = (step_where_one_residual_needs_a_gradient, *shares, of_input, create_graph)
    for activation, first, second in zip(
        (None, *ACTIVATIONS), *ranks.run(2, *arguments), strict=True
    ):
        composed = Composed(activation, dtype=torch.float64)
        right = outcome(composed, composed.norm, x, residual)
        torch.testing.assert_close(first["dx"], right["dx"][:2], **FP64)
        torch.testing.assert_close(first["dresidual"], right["dresidual"][:2], **FP64)
        assert second.keys() == ({"dx"} if of_input else set())
        if of_input:
            torch.testing.assert_close(second["dx"], right["dx"][2:], **FP64)
