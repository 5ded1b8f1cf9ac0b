"""Times what the host does for a layer and for a launch, where there is no GPU.

Launches go to the stand-in driver: all of Triton's host path runs, and nothing on a device. Each
figure is the least of many rounds, in which the contestants take turns. World of one, tiny input.

    python bench/host_time.py
"""

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from unittest import mock

if os.environ.get("TRITON_INTERPRET") == "1":
    sys.exit("TRITON_INTERPRET=1 is set: interpreted kernels have another host path. Unset it.")

import stand_in
import torch
from syncbn_triton.kernels import launchers
from syncbn_triton.kernels.plan import Plan

from syncbn_triton import SyncBatchNorm, operations

SHAPE = (2, 64, 4, 4)
ROUNDS, REPEAT = 30, 100


def microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The least time of each call."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(REPEAT):
                call()
            least[name] = min(least[name], (time.perf_counter() - start) / REPEAT * 1e6)
    return least


def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Forward and backward."""
    layer(x.detach().requires_grad_()).backward(dy)


def launches(take_step: Callable[[], None]) -> dict[str, Callable[[], object]]:
    """Every launch of a step, by its plan and by Triton alone."""
    with mock.patch.object(Plan, "launch", autospec=True, side_effect=Plan.launch) as launch:
        take_step()
    calls = {}
    for plan, *tensors in (call.args for call in launch.call_args_list):
        scalars = launch.call_args_list[len(calls) // 2].kwargs.get("scalars", ())
        arguments = (*tensors, *plan._integers, *scalars, *plan._constants)
        by_triton = partial(plan._kernel.run, *arguments, grid=plan._grid, warmup=False)
        name = plan._kernel.__name__.removesuffix("_kernel")
        calls[f"{name}, planned"] = partial(plan.launch, *tensors, scalars=scalars)
        calls[f"{name}, by Triton"] = partial(
            by_triton, num_warps=plan._num_warps, enable_fp_fusion=True
        )
    return calls


def main() -> None:
    """Prints microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    driver = stand_in.install("sm_90")
    operations._backend = lambda x: launchers
    x, dy = torch.randn(SHAPE), torch.randn(SHAPE)
    ours = partial(step, SyncBatchNorm(SHAPE[1]), x, dy)
    theirs = partial(step, torch.nn.BatchNorm2d(SHAPE[1]), x, dy)
    driver.launches = deque(maxlen=0)
    least = microseconds({"SyncBatchNorm": ours, "nn.BatchNorm2d": theirs} | launches(ours))
    if arguments.json:
        print(json.dumps(least))
        return
    for name, time_ in least.items():
        print(f"{name:<32}{time_:8.1f} us")


if __name__ == "__main__":
    main()
