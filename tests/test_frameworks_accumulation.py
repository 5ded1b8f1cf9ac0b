"""Gradients accumulated before ranks reduce them make the step that one process makes."""

import contextlib
from collections.abc import Callable, Sequence

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from training import (
    TIMEOUT,
    State,
    assert_each_is,
    batches,
    converted,
    loss_of,
    net,
    sharded,
    share,
    state,
)


def accumulate(model: nn.Module, steps: Sequence[list[Tensor]]) -> None:
    """A step of the optimizer for the gradients of all batches, which the last one reduces."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for i, step in enumerate(steps):
        last = i == len(steps) - 1
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel) and not last:
            context = model.no_sync()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        with context:
            loss_of(model, *step).backward()
    optimizer.step()


def accumulate_with_ddp(rank: int) -> State:
    model = DistributedDataParallel(converted())
    accumulate(model, share(rank, batches()[:2]))
    return state(model)


def accumulate_with_fsdp(rank: int) -> State:
    model = sharded(converted(), "by block")
    accumulate(model, share(rank, batches()[:2]))
    return state(model)


@pytest.mark.parametrize("function", [accumulate_with_ddp, accumulate_with_fsdp])
def test_accumulation_without_reducing_gradients(
    ranks: RankPool, function: Callable[[int], State]
) -> None:
    """``no_sync`` holds back the gradients, never the statistics."""
    results = ranks.run(2, function, timeout=TIMEOUT)
    model = net()
    accumulate(model, batches()[:2])
    assert_each_is(results, state(model))
