"""A rank that dies or raises during training: the others end with an error, in time.

Each test has a pool of its own, since it loses the processes.
"""

import os
import re
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from ranks import TIMEOUT, RankError, RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_triton import convert_sync_batchnorm

# Of training, of which rank 1 takes part in the first.
STEPS = 3


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def import_this(rank: int) -> None:
    """Starts a rank and imports this file, which takes longer than all else."""


def fail(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    # As an exception that nobody catches ends a process: exit code 1, unless a thread of gloo's
    # that still runs aborts it first. (A rank of the pool would survive the exception itself.)
    raise SystemExit(1)


def train_until_rank_one_fails(rank: int, how: str, moment: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    model = DistributedDataParallel(convert_sync_batchnorm(net))
    for step in range(STEPS):
        failing = rank == 1 and step == 1
        if failing and moment == "before forward":
            fail(how)
        y = model(torch.randn(5, 3))
        if failing and moment == "before backward":
            fail(how)
        y.square().sum().backward()


@pytest.mark.parametrize(
    ("world_size", "how", "moment"),
    [
        (3, "killed", "before backward"),
        (2, "raises", "before forward"),
    ],
)
def test_r8_a_rank_that_fails_ends_the_others_in_time(
    pool: RankPool, world_size: int, how: str, moment: str
) -> None:
    pool.run(world_size, import_this)
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        pool.run(world_size, train_until_rank_one_fails, how, moment)
    assert time.monotonic() - start < TIMEOUT.total_seconds()
    _, *parts = re.split(r"^rank (\d):\n", str(error.value), flags=re.MULTILINE)
    errors = dict(zip(parts[::2], parts[1::2], strict=True))
    codes = [-signal.SIGKILL] if how == "killed" else [1, -signal.SIGABRT]
    assert errors.pop("1").strip() in [f"ended with exit code {int(code)}" for code in codes]
    assert len(errors) == world_size - 1
    assert all("RuntimeError" in text for text in errors.values())
