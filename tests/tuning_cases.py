"""Tunes through the stand-in driver, with a timer that knows what is fast.

    python tests/tuning_cases.py FOLDER

It prints a JSON object, for `test_autotune.py`, which runs it without ``TRITON_INTERPRET``.
"""

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import autotune
import stand_in
import torch
from syncbn_triton.kernels import blocks, candidates, launchers, tables, tuning
from syncbn_triton.kernels.blocks import Blocks
from syncbn_triton.kernels.entries import KERNELS
from syncbn_triton.kernels.plan import forget_plans
from torch import Tensor
from triton.runtime.errors import OutOfResources

from syncbn_triton import SyncBatchNorm, operations

DEVICE = "Some_GPU"
SIZE = (8, 64, 28, 28)
CHOICES = 4
CAPTURING = "is_current_stream_capturing"
Launch = stand_in.Launch


class Timer:
    """Has launches cost what their tiles and warps differ from 1024 elements and 8 warps."""

    def __init__(self, driver: stand_in.StandInDriver) -> None:
        self.driver, self.launches = driver, []
        self.calls = self.failures = 0

    def __call__(self, launch: Callable[[], object], quantiles: Sequence[float], **_: int) -> Any:
        self.calls += 1
        first = len(self.driver.launches)
        launch()
        launched = self.driver.launches[first:]
        self.launches += launched
        costs = [cost(lanes(each), each.num_warps) for each in launched if "TILE" in each.constants]
        if max(costs) == float("inf"):
            self.failures += 1
            raise OutOfResources(2, 1, "shared memory")
        return [sum(costs)] * len(quantiles)


def lanes(launch: Launch) -> int:
    return launch.constants["TILE"].BLOCK_C * launch.constants["TILE"].BLOCK_S


def cost(elements: int, num_warps: int) -> float:
    """Milliseconds; tiles of 512 would be best but for the memory they are said to lack."""
    return float("inf") if elements == 512 else 1 + abs(elements - 1024) / 1024 + 8 - num_warps


def few(*arguments: Any) -> list[Blocks]:
    """The heuristic's blocks and some of the others, for each of which kernels are compiled."""
    first, *others = candidates.candidates(*arguments)
    return [first, *others[:: len(others) // (CHOICES - 1)]]


def last_launch(launches: list[Launch], kernel: str) -> list[int]:
    """Lanes and warps of the last launch of a kernel."""
    launch = next(each for each in reversed(launches) if each.name == f"{kernel}_kernel")
    return [lanes(launch), launch.num_warps]


def shape_of(choice: Blocks) -> list[int]:
    """Lanes and warps of blocks."""
    return [1 << (choice.BLOCK_C * choice.BLOCK_S - 1).bit_length(), choice.num_warps]


def choices(x: Tensor) -> dict[str, list[list[int]]]:
    """Lanes and warps of all that can be chosen for each kernel, the heuristic's first."""
    case, result = tuning.Case(SIZE, x.stride(), x.stride(), x.dtype, x.device), {}
    for pair, kernels in tuning.PAIRS.items():
        for kernel, v in zip(kernels, case.views(pair), strict=True):
            result[kernel] = [shape_of(choice) for choice in few(kernel, v, x.dtype, x.device)]
    return result


@contextmanager
def fresh(folder: Path, **variables: str) -> Iterator[Path]:
    """An empty cache folder, no plans, and nothing tuned yet."""
    forget_plans()
    tuning._tune_once.cache_clear()
    with mock.patch.dict(os.environ, SYNCBN_TRITON_CACHE=str(folder), **variables):
        yield folder / f"{DEVICE}.jsonl"


def training(folder: Path, timer: Timer) -> dict[str, Any]:
    """A layer's first step tunes, its second does not, nor does that of another process."""
    layer, driver = SyncBatchNorm(SIZE[1]), timer.driver
    x, dy = torch.randn(SIZE, requires_grad=True), torch.randn(SIZE)
    mine = {t.data_ptr() for t in (x, dy, layer.weight, layer.bias, layer.running_mean)}
    generator, output = torch.get_rng_state(), io.StringIO()
    timings, launched = [], []

    def step() -> None:
        before = timer.calls
        layer(x).backward(dy)
        timings.append(timer.calls - before)
        launched.append({kernel: last_launch(driver.launches, kernel) for kernel in KERNELS})

    with fresh(folder, SYNCBN_TRITON_AUTOTUNE="1") as path, contextlib.redirect_stderr(output):
        step()
        step()
        # As in another process.
        tables._read.cache_clear()
        tuning._tune_once.cache_clear()
        forget_plans()
        step()
        entries = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        "timings": timings,
        "failures": timer.failures,
        "launched": launched,
        "choices": choices(x),
        "entries": entries,
        "output": output.getvalue(),
        "touched by tuning": len(pointers(timer.launches) & mine),
        "touched by the layer": len(pointers(driver.launches) & mine),
        "random numbers as before": torch.equal(generator, torch.get_rng_state()),
    }


def pointers(launches: list[Launch]) -> set[int]:
    arguments = [a for launch in launches for a in launch.arguments if isinstance(a, Tensor)]
    return {a.data_ptr() for a in arguments}


def not_tuned(folder: Path, timer: Timer) -> dict[str, int]:
    """Timings where a launch has no time for them, and where it has."""
    x, on = torch.randn(SIZE), {"SYNCBN_TRITON_AUTOTUNE": "1"}

    def timings(name: str, **variables: str) -> int:
        before = timer.calls
        with fresh(folder / name, **variables):
            launchers.channel_stats(x)
        return timer.calls - before

    result = {"unset": timings("a"), "0": timings("b", SYNCBN_TRITON_AUTOTUNE="0")}
    with mock.patch.object(torch.cpu, CAPTURING, return_value=True, create=True):
        result["capturing"] = timings("c", **on)
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        result["compiling"] = timings("d", **on)
    with mock.patch.object(torch.cpu, CAPTURING, return_value=False, create=True):
        return result | {"otherwise": timings("e", **on)}


def out_of_memory(folder: Path, timer: Timer) -> dict[str, Any]:
    """What a launch does that cannot be tuned for."""
    x, allocate = torch.randn(SIZE), mock.Mock(side_effect=torch.OutOfMemoryError)
    with (
        fresh(folder, SYNCBN_TRITON_AUTOTUNE="1") as path,
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(tuning, "_random", allocate),
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            launchers.channel_stats(x)
            forget_plans()
        return {
            "warnings": [str(warning.message) for warning in caught],
            "tries": allocate.call_count,
            "written": path.exists(),
            "launched": last_launch(timer.driver.launches, "channel_stats"),
            "heuristic": choices(x)["channel_stats"][0],
        }


def command_line(folder: Path, timer: Timer) -> list[dict[str, Any]]:
    """What runs of `autotune.py` print, one after another, and how often they time."""
    size, other = ",".join(map(str, SIZE)), "512,64"
    runs = (
        ["--shapes", size],
        ["--shapes", size, other],
        ["--shapes", size, other],
        ["--shapes", other, "--again"],
    )
    result = []
    with fresh(folder) as path:
        for arguments in runs:
            before, output = timer.calls, io.StringIO()
            tables._read.cache_clear()
            with contextlib.redirect_stdout(output):
                autotune.main([*arguments, "--dtypes", "float32"])
            lines = path.read_text().splitlines()
            printed = output.getvalue()
            result.append({"timings": timer.calls - before, "lines": lines, "printed": printed})
    return result


def main(folder: Path) -> None:
    """Runs all cases."""
    driver = stand_in.install("sm_90")
    timer = Timer(driver)
    driver.get_benchmarker = lambda: timer
    operations._backend = lambda x: launchers
    autotune.gpu = lambda: torch.device("cpu")
    tuning.candidates = few
    for module in (blocks, tuning, autotune):
        module.device_name = lambda device: DEVICE
    cases = (training, not_tuned, out_of_memory, command_line)
    print(json.dumps({case.__name__: case(folder / case.__name__, timer) for case in cases}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
