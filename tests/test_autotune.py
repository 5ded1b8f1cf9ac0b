"""Tuning finds the fastest blocks, leaves training alone, and remembers what it found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import DTYPES, examples
from syncbn_triton.kernels import blocks as kernel_blocks
from syncbn_triton.kernels import candidates as kernel_candidates
from syncbn_triton.kernels.blocks import heuristic
from syncbn_triton.kernels.candidates import candidates
from syncbn_triton.kernels.entries import KERNELS, Entry, key_of, parse, serialize
from syncbn_triton.kernels.layout import Strides, View
from syncbn_triton.kernels.tuning import PAIRS, Case, case_of
from torch import Tensor

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
MODEL = """
from torch import nn

def small():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.Flatten(),
        nn.Linear(16 * 64, 24),
        nn.BatchNorm1d(24),
    )
"""
SIZES = st.floats(0, 20).map(lambda exponent: int(2**exponent))


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in a process whose kernels are not interpreted."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"} | variables
    command = [sys.executable, str(ROOT / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tuning_cases.py` saw."""
    done = run("tests/tuning_cases.py", str(tmp_path_factory.mktemp("cache")))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def cost(choice: list[int]) -> float:
    """As in `tuning_cases.py`."""
    elements, num_warps = choice
    return float("inf") if elements == 512 else 1 + abs(elements - 1024) / 1024 + 8 - num_warps


def test_training_launches_the_fastest_blocks_from_the_first_step_on(cases: dict[str, Any]) -> None:
    case = cases["training"]
    fastest = {kernel: min(choices, key=cost) for kernel, choices in case["choices"].items()}
    assert case["launched"] == [fastest] * 3
    assert all(fastest[kernel] != choices[0] for kernel, choices in case["choices"].items())
    first, *later = case["timings"]
    # Each kernel's choices beside the other's, in two rounds at least.
    assert first >= 4 * 2 * 3
    assert later == [0, 0]
    # Some candidate did not fit the GPU.
    assert case["failures"] > 0


def test_tuning_leaves_training_alone(cases: dict[str, Any]) -> None:
    case = cases["training"]
    assert case["touched by tuning"] == 0
    assert case["touched by the layer"] == 5
    assert case["random numbers as before"]


def test_tuning_writes_the_table_and_a_line_for_each_direction(cases: dict[str, Any]) -> None:
    case = cases["training"]
    entries = [parse(json.dumps(fields)) for fields in case["entries"]]
    assert [entry.kernel for entry in entries] == [k for pair in PAIRS.values() for k in pair]
    for entry in entries:
        assert entry[1:6] == ("float32", "contiguous", 8, 64, 784)
        assert entry.tuned_us < entry.heuristic_us
    lines = case["output"].splitlines()
    assert len(lines) == 2
    assert "tuned forward of (N, C, S) = (8, 64, 784), contiguous, float32" in lines[0]
    assert "backward" in lines[1]


def test_tuning_waits_for_a_launch_that_has_time(cases: dict[str, Any]) -> None:
    timings = cases["not_tuned"]
    assert timings.pop("otherwise") > 0
    assert timings == {"unset": 0, "0": 0, "capturing": 0, "compiling": 0}


def test_without_memory_to_tune_the_heuristic_serves(cases: dict[str, Any]) -> None:
    case = cases["out_of_memory"]
    assert case["launched"] == case["heuristic"]
    assert not case["written"]
    assert case["tries"] == 1
    assert len(case["warnings"]) == 1
    assert "no memory to tune forward" in case["warnings"][0]


def test_a_run_goes_on_where_the_last_one_stopped(cases: dict[str, Any]) -> None:
    first, second, third, again = cases["command_line"]
    assert [len(each["lines"]) for each in (first, second, third, again)] == [4, 8, 8, 8]
    assert set(first["lines"]) < set(second["lines"]) == set(third["lines"])
    assert first["timings"] > 0
    assert "8x64x28x28" in first["printed"]
    # What was there is not tuned again, unless told.
    assert "8x64x28x28" not in second["printed"]
    assert "512x64" in second["printed"]
    assert third["timings"] == 0
    assert "Nothing left" in third["printed"]
    assert again["timings"] == second["timings"] > 0


def test_a_run_prints_times_their_ratio_and_the_blocks(cases: dict[str, Any]) -> None:
    printed = cases["command_line"][0]["printed"].splitlines()
    entries = [parse(line) for line in cases["command_line"][0]["lines"][:2]]
    assert printed[0].split() == ["heuristic", "us", "tuned", "us", "ratio"]
    before, after = entries[0].heuristic_us, entries[0].tuned_us
    row = ["8x64x28x28", "float32", "contiguous", "forward", f"{before:.1f}", f"{after:.1f}"]
    assert printed[1].split()[:7] == [*row, f"{before / after:.2f}"]
    for entry in entries:
        assert f"{entry.BLOCK_C}x{entry.BLOCK_S} /{entry.split} {entry.num_warps}w" in printed[1]
    assert printed[-1].endswith("Some_GPU.jsonl")


def test_without_a_gpu_there_is_nothing_to_tune_for(tmp_path: Path) -> None:
    assert not torch.accelerator.is_available()
    done = run("bench/autotune.py", "--suite", SYNCBN_TRITON_CACHE=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("No GPU")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("memory_format", ["contiguous", "channels-last"])
def test_a_dry_run_lists_what_a_model_normalizes(tmp_path: Path, memory_format: str) -> None:
    (tmp_path / "networks.py").write_text(MODEL)
    arguments = ("--model", "networks:small", "--input", "4,3,8,8", "--dry-run")
    variables = {"PYTHONPATH": str(tmp_path), "SYNCBN_TRITON_CACHE": str(tmp_path / "cache")}
    done = run("bench/autotune.py", *arguments, "--memory-format", memory_format, **variables)
    assert done.returncode == 0, done.stderr
    assumed, *rows = done.stdout.splitlines()
    assert "132 multiprocessors" in assumed
    # Two layers have one shape; a flattened input has channels innermost.
    assert [row.split()[:4] for row in rows] == [
        ["4x16x8x8", "bfloat16", memory_format, "forward"],
        ["4x16x8x8", "bfloat16", memory_format, "backward"],
        ["4x24", "bfloat16", "channels-last", "forward"],
        ["4x24", "bfloat16", "channels-last", "backward"],
    ]
    assert not (tmp_path / "cache").exists()


def test_a_dry_run_counts_candidates_and_shows_what_the_heuristic_chooses() -> None:
    done = run("bench/autotune.py", "--shapes", "32,64,56,56", "--dry-run")
    v = View(32, 64, 3136, (Strides(64 * 3136, 3136, 1),), (False,))
    with pytest.MonkeyPatch.context() as patch:
        for module in (kernel_blocks, kernel_candidates):
            patch.setattr(module, "multiprocessors", lambda device: 132)
        choices = candidates("channel_stats", v, torch.bfloat16, CPU)
    first = choices[0]
    text = f"{len(choices)}, {first.BLOCK_C}x{first.BLOCK_S} /{first.split} {first.num_warps}w"
    assert text in done.stdout.splitlines()[1]


@pytest.mark.parametrize("arguments", [["--shapes", "2,0,3"], ["--model", "resnet50"]])
def test_a_command_line_that_asks_for_nothing_is_refused(arguments: list[str]) -> None:
    done = run("bench/autotune.py", *arguments)
    assert done.returncode == 2
    assert "usage: " in done.stderr


@examples(200)
@given(
    kernel=st.sampled_from(KERNELS),
    N=SIZES,
    C=SIZES,
    S=SIZES,
    channels_fastest=st.booleans(),
    dense=st.booleans(),
    dtype=DTYPES,
)
def test_candidates_are_few_and_can_all_be_launched(
    kernel: str,
    N: int,
    C: int,
    S: int,
    channels_fastest: bool,
    dense: bool,
    dtype: torch.dtype,
) -> None:
    assume(N * C * S <= 2**32)
    N = 1 if channels_fastest and dense else N
    s, c = (C, 1) if channels_fastest else (1, S)
    v = View(N, C, S, (Strides(C * S, c, s if dense else s + 1),), (False,))
    with pytest.MonkeyPatch.context() as patch:
        for module in (kernel_blocks, kernel_candidates):
            patch.setattr(module, "multiprocessors", lambda device: 132)
        choices = candidates(kernel, v, dtype, CPU)
        assert choices[0] == heuristic(kernel, v, dtype, CPU)
    assert len({blocks.cut(v) for blocks in choices}) == len(choices) <= 80
    for blocks in choices:
        # Whatever may be chosen, a table may hold.
        entry = Entry(*key_of(kernel, v, dtype), *blocks, 1.0, 1.0, "3.8.0")
        assert parse(serialize(entry)) == entry
    for blocks in choices[1:]:
        tile = blocks.cut(v).tile
        padded = -(-C // blocks.BLOCK_C) * -(-S // blocks.BLOCK_S) * tile.BLOCK_C * tile.BLOCK_S
        assert padded <= 2 * C * S
        assert dense or not blocks.flat


def layouts() -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs as people train with, each with a gradient."""
    image, volume = torch.empty(4, 8, 6, 6), torch.empty(2, 3, 4, 5, 6)
    last = image.contiguous(memory_format=torch.channels_last)
    last_3d = volume.contiguous(memory_format=torch.channels_last_3d)
    points, sequence = torch.empty(50, 24), torch.empty(4, 20, 8).transpose(1, 2)
    return {
        "contiguous": (image, image),
        "contiguous 3-D": (volume, volume),
        "channels-last": (last, last),
        "channels-last 3-D": (last_3d, last_3d),
        "2-D": (points, points),
        "one sample": (image[:1], image[:1]),
        "transposed sequence": (sequence, sequence.contiguous()),
        "some channels": (image[:, 2:6], image[:, 2:6].contiguous()),
        "some channels last": (last[:, 2:6], last[:, 2:6]),
        "gradient of another format": (image, last),
        "gradient of a sum": (image, torch.empty(()).expand(image.shape)),
    }


@pytest.mark.parametrize("layout", layouts())
def test_what_is_tuned_has_the_view_that_was_asked_for(layout: str) -> None:
    x, dy = layouts()[layout]
    case = Case(tuple(x.shape), x.stride(), dy.stride(), torch.float32, CPU)
    for pair, kernels in PAIRS.items():
        for kernel, v in zip(kernels, case.views(pair), strict=True):
            made = case_of(v, torch.float32, CPU)
            assert key_of(kernel, v, torch.float32) in made.keys(pair)
            if pair == "backward" and kernel == kernels[1]:
                # Down to the strides.
                assert made.views(pair)[1].strides == v.strides
