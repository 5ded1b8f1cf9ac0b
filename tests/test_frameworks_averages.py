"""Averages of a model trained across ranks are those of one process, kept by torch or by hand."""

import copy
from collections.abc import Callable

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from training import TIMEOUT, State, assert_each_is, batches, converted, net, share, state, train


def averaged_weights(model: nn.Module, steps: list[list[Tensor]]) -> State:
    """As torch documents it: statistics of averaged weights are taken anew afterwards."""
    average = AveragedModel(model)
    train(model, steps, after_step=lambda: average.update_parameters(model))
    # Of the data, only input is passed on.
    update_bn([x for x, _, _ in steps], Blocks(average.module))
    return state(average.module)


def average_of_all_state(model: nn.Module, steps: list[list[Tensor]]) -> State:
    """An exponential average of parameters and buffers, in evaluation."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
    train(model, steps, after_step=lambda: average.update_parameters(model))
    average.eval()
    with torch.no_grad():
        return {**state(average.module), "y": average(*batches()[0][:2])}


def average_of_a_copy(model: nn.Module, steps: list[list[Tensor]]) -> State:
    """What training scripts write by hand."""
    average = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update() -> None:
        for ours, new in zip(
            average.state_dict().values(), model.state_dict().values(), strict=True
        ):
            if ours.is_floating_point():
                ours.lerp_(new, 0.2)
            else:
                ours.copy_(new)

    train(model, steps, after_step=update)
    with torch.no_grad():
        return {**state(average), "y": average(*batches()[0][:2])}


class Blocks(nn.Module):
    """The part of a model with norms, of one input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.blocks = getattr(model, "module", model).blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


Average = Callable[[nn.Module, list[list[Tensor]]], State]


def average_on_rank(rank: int, average: Average) -> State:
    return average(DistributedDataParallel(converted()), share(rank, batches()))


@pytest.mark.parametrize("average", [averaged_weights, average_of_all_state, average_of_a_copy])
def test_averages_of_a_model(ranks: RankPool, average: Average) -> None:
    assert_each_is(
        ranks.run(2, average_on_rank, average, timeout=TIMEOUT), average(net(), batches())
    )
