"""Users' cases: torch's own numerical check of derivatives of every order, on all ranks at once.

The function under check takes the whole batch, known to all ranks, to the whole output: each rank
normalizes its share, and the shares are gathered. Ranks perturb and differentiate in lockstep, so
that all of them find the numerical and the analytical Jacobian of one and the same function.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from test_cases_layout import randn
from torch import Tensor

from syncbn_triton import SyncBatchNorm


class Share(torch.autograd.Function):
    """This rank's part of a tensor that all ranks hold."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, split: tuple[int, ...]) -> Tensor:
        ctx.split = split
        return whole.split(split)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Gather.apply(grad, ctx.split), None


class Gather(torch.autograd.Function):
    """A tensor that all ranks hold, from this rank's part of it; the adjoint of `Share`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, split: tuple[int, ...]) -> Tensor:
        ctx.split = split
        whole = part.new_zeros(sum(split), *part.shape[1:])
        whole.split(split)[dist.get_rank()].copy_(part)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Share.apply(grad, ctx.split), None


class Replicate(torch.autograd.Function):
    """A parameter that each rank uses a copy of."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor) -> Tensor:
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Total.apply(grad)


class Total(torch.autograd.Function):
    """The sum of what all ranks hold; the adjoint of `Replicate`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Replicate.apply(grad)


def normalize_on_ranks(
    split: tuple[int, ...], memory_format: torch.memory_format
) -> Callable[..., Tensor]:
    """The layer as a function of the batch of all ranks, and of the parameters if there are any."""
    layers = {
        count: SyncBatchNorm(2, affine=count > 0, bias=count > 1, dtype=torch.float64)
        for count in range(3)
    }

    def normalize(whole: Tensor, *parameters: Tensor) -> Tensor:
        x = Share.apply(whole, split).contiguous(memory_format=memory_format)
        replicas = {
            name: Replicate.apply(parameter)
            for name, parameter in zip(("weight", "bias"), parameters, strict=False)
        }
        y = torch.func.functional_call(layers[len(parameters)], replicas, (x,))
        return Gather.apply(y, split)

    return normalize


def of_input(normalize: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The first derivative of a nonlinear function of the output."""

    def derivative(whole: Tensor, *parameters: Tensor) -> Tensor:
        loss = normalize(whole, *parameters).tanh().sum()
        return torch.autograd.grad(loss, whole, create_graph=True)[0]

    return derivative


def check_derivatives_on_rank(
    rank: int, split: tuple[int, ...], inputs: list[Tensor], memory_format: torch.memory_format
) -> None:
    """First and second derivatives; each check raises where they are wrong."""
    # torch draws gradients of outputs.
    torch.manual_seed(0)
    inputs = [t.requires_grad_() for t in inputs]
    normalize = normalize_on_ranks(split, memory_format)
    torch.autograd.gradcheck(normalize, inputs)
    torch.autograd.gradgradcheck(normalize, inputs)


def check_third_derivative_on_rank(rank: int, split: tuple[int, ...], inputs: list[Tensor]) -> None:
    torch.manual_seed(0)
    inputs = [t.requires_grad_() for t in inputs]
    normalize = normalize_on_ranks(split, torch.contiguous_format)
    torch.autograd.gradgradcheck(of_input(normalize), inputs)


def random_inputs(size: tuple[int, ...], parameters: int) -> list[Tensor]:
    return [randn(*size), *randn(parameters, 2)]


@pytest.mark.parametrize("parameters", [0, 1, 2], ids=["not affine", "no bias", "affine"])
@pytest.mark.parametrize("split", [(2, 2), (1, 3), (3, 0)], ids=str)
def test_l9_first_and_second_derivatives(
    ranks: RankPool, split: tuple[int, ...], parameters: int
) -> None:
    inputs = random_inputs((sum(split), 2), parameters)
    ranks.run(len(split), check_derivatives_on_rank, split, inputs, torch.contiguous_format)


def test_l9_first_and_second_derivatives_in_channels_last(ranks: RankPool) -> None:
    inputs = random_inputs((3, 2, 2, 1), 2)
    ranks.run(2, check_derivatives_on_rank, (1, 2), inputs, torch.channels_last)


@pytest.mark.parametrize("split", [(4,), (1, 3)], ids=["world of one", "2 ranks"])
def test_l9_third_derivative(ranks: RankPool, split: tuple[int, ...]) -> None:
    ranks.run(len(split), check_third_derivative_on_rank, split, random_inputs((4, 2), 2))
