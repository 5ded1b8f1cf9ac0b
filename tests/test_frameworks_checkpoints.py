"""Distributed checkpoints resume, under another wrapper too, and pass to and from torch's layer."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from training import (
    TIMEOUT,
    State,
    assert_each_is,
    batches,
    converted,
    net,
    sharded,
    share,
    state,
    train,
)

from syncbn_triton import convert_sync_batchnorm


def save(model: nn.Module, folder: Path, **options: Any) -> None:
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder, **options)


def load(model: nn.Module, folder: Path, **options: Any) -> None:
    """Into the model's own tensors, under their layout over the ranks."""
    saved = {"model": get_model_state_dict(model)}
    dcp.load(saved, checkpoint_id=folder, **options)
    set_model_state_dict(model, saved["model"])


def other() -> nn.Module:
    """Of the same shape, and in another state in every tensor."""
    model = net()
    with torch.no_grad():
        for t in model.state_dict().values():
            t.add_(3)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": functools.partial(sharded, layout="by block"),
    "fsdp, norms whole": functools.partial(sharded, layout="norms whole"),
}


def resume_on_rank(rank: int, first: str, second: str, folder: Path) -> State:
    """Trains two steps and saves; loads into another model, and trains the third step."""
    steps = share(rank, batches())
    model = WRAPPERS[first](converted())
    train(model, steps[:2], torch.optim.SGD(model.parameters(), lr=0.2))
    save(model, folder)
    resumed = WRAPPERS[second](convert_sync_batchnorm(other()))
    load(resumed, folder)
    train(resumed, steps[2:], torch.optim.SGD(resumed.parameters(), lr=0.2))
    return state(resumed)


# Said of a checkpoint that one process writes or reads.
ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@ALONE
@pytest.mark.parametrize(
    ("first", "second"),
    [("ddp", "ddp"), ("fsdp", "fsdp"), ("fsdp", "ddp"), ("ddp", "fsdp, norms whole")],
)
def test_distributed_checkpoint_resumes(
    ranks: RankPool, tmp_path: Path, first: str, second: str
) -> None:
    results = ranks.run(2, resume_on_rank, first, second, tmp_path, timeout=TIMEOUT)
    model = net()
    train(model, batches(), torch.optim.SGD(model.parameters(), lr=0.2))
    assert_each_is(results, state(model))
    # What the ranks saved, in one process and with torch's layer.
    restored, right = other(), net()
    load(restored, tmp_path, no_dist=True)
    train(right, batches()[:2], torch.optim.SGD(right.parameters(), lr=0.2))
    assert_each_is([state(restored)], state(right))


def load_on_rank(rank: int, wrapper: str, folder: Path) -> State:
    model = WRAPPERS[wrapper](convert_sync_batchnorm(other()))
    load(model, folder)
    return state(model)


@ALONE
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_distributed_checkpoint_of_torchs_layer_loads(
    ranks: RankPool, tmp_path: Path, wrapper: str
) -> None:
    model = net()
    train(model, batches())
    save(model, tmp_path, no_dist=True)
    for result in ranks.run(2, load_on_rank, wrapper, tmp_path, timeout=TIMEOUT):
        torch.testing.assert_close(result, state(model), rtol=0, atol=0)
