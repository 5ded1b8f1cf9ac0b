"""The host's part of the Triton path, where there is no GPU: launches go to the stand-in driver.

Beside each stands a step of `nn.BatchNorm` on the CPU, for scale.

    make bench
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have another host path", allow_module_level=True)
pytest.importorskip("triton")

import stand_in
from host_time import SHAPE, launches, step
from syncbn_triton.kernels import launchers
from syncbn_triton.kernels.channel_stats import _plans

from syncbn_triton import SyncBatchNorm, operations

WHO = ("nn.BatchNorm", "layer", "plan lookup")
KERNELS = ("channel_stats", "normalize", "backward_reduce", "backward_input")
BY = ("planned", "by Triton")


@pytest.fixture(scope="module")
def calls() -> Iterator[dict[str, Callable[[], object]]]:
    """A step of each layer, a plan looked up, and each launch, by its plan and by Triton alone."""
    driver = stand_in.install("sm_90")
    x, dy = torch.randn(SHAPE), torch.randn(SHAPE)
    ours = partial(step, SyncBatchNorm(SHAPE[1]), x, dy)
    theirs = partial(step, torch.nn.BatchNorm2d(SHAPE[1]), x, dy)
    # Other files measure the CPU's own backend.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "_backend", lambda x: launchers)
        of_launches = launches(ours)
        driver.launches = deque(maxlen=0)
        look_up = partial(_plans, x.shape, x.stride(), x.dtype, x.device, None)
        yield dict(zip(WHO, (theirs, ours, look_up), strict=True)) | of_launches


@pytest.mark.parametrize("who", [*WHO, *(f"{kernel}, {by}" for kernel in KERNELS for by in BY)])
def test_host(
    benchmark: BenchmarkFixture, calls: dict[str, Callable[[], object]], who: str
) -> None:
    benchmark.group = f"host, step {SHAPE}"
    benchmark(calls[who])
