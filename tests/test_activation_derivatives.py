"""First and second derivatives of a fused residual and activation are right, across ranks too."""

from collections.abc import Callable

import pytest
import torch
from composed import Tensors, pair
from ranks import RankPool
from test_activation import CASES, SLOPE
from test_cases_higher_order import gathered
from test_cases_layout import FP64, randn
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm, sync_batch_norm

pytestmark = pytest.mark.usefixtures("aten")


def functional(activation: str | None, added: bool) -> Callable[..., Tensor]:
    """The layer as a function of x, weight, bias and the residual."""

    def normalize(x: Tensor, weight: Tensor, bias: Tensor, *residual: Tensor) -> Tensor:
        return sync_batch_norm(
            x,
            None,
            None,
            weight,
            bias,
            training=True,
            residual=residual[0] if added else None,
            activation=activation,
            negative_slope=SLOPE,
        )

    return normalize


@pytest.mark.parametrize(("activation", "added"), CASES)
def test_first_and_second_derivatives(activation: str | None, added: bool) -> None:
    inputs = [randn(4, 2), randn(2), randn(2), *([2 * randn(4, 2)] if added else [])]
    inputs = [t.requires_grad_() for t in inputs]
    normalize = functional(activation, added)
    torch.autograd.gradcheck(normalize, inputs, fast_mode=True)
    torch.autograd.gradgradcheck(normalize, inputs, fast_mode=True)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("activation", ["gelu", "hardswish"])
def test_first_derivatives_through_the_kernels(backend: str, activation: str) -> None:
    inputs = [t.requires_grad_() for t in (randn(3, 1), randn(1), randn(1), randn(3, 1))]
    torch.autograd.gradcheck(functional(activation, True), inputs, fast_mode=True)


def gradients_of_penalty(
    function: Callable[..., Tensor], layer: nn.Module, x: Tensor, residual: Tensor | None
) -> Tensors:
    """Gradients of how far those of a first loss are from 1, over samples."""
    given = {"x": x.detach().requires_grad_()}
    if residual is not None:
        given["residual"] = residual.detach().requires_grad_()
    layer.zero_grad()
    loss = function(*given.values()).square().sum()
    first = torch.autograd.grad(loss, list(given.values()), create_graph=True)
    sum((g.flatten(1).norm(dim=1) - 1).square().sum() for g in first).backward()
    second = {name: t.grad for name, t in given.items()}
    return {"dx": first[0].detach(), **second, **{n: p.grad for n, p in layer.named_parameters()}}


def penalize_on_rank(
    rank: int, state: Tensors, xs: list[Tensor], residuals: list[Tensor]
) -> list[Tensors]:
    results = []
    for activation, added in CASES:
        layer = SyncBatchNorm(3, activation=activation, negative_slope=SLOPE).double()
        layer.load_state_dict(state)
        residual = residuals[rank] if added else None
        results.append(gradients_of_penalty(layer, layer, xs[rank], residual))
    return results


@pytest.mark.parametrize("split", [(1, 4), (3, 0)], ids=str)
def test_gradient_penalty_across_ranks(ranks: RankPool, split: tuple[int, ...]) -> None:
    _, composed = pair(None, dtype=torch.float64)
    state = composed.norm.state_dict()
    x, residual = randn(2, sum(split), 3, 2, 2)
    results = ranks.run(2, penalize_on_rank, state, x.split(split), residual.split(split))
    for (activation, added), *of_ranks in zip(CASES, *results, strict=True):
        composed.activation = activation
        right = gradients_of_penalty(composed, composed.norm, x, residual if added else None)
        residuals = [r.pop("residual") for r in of_ranks] if added else []
        actual = gathered(of_ranks)
        if residuals:
            actual["residual"] = torch.cat(residuals)
        torch.testing.assert_close(actual, right, **FP64, msg=f"{activation}, {added}")
