"""Every kernel compiles for the GPUs we name, and costs what the design allows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "kernel_cost.py"
# In the order of a training step.
KERNELS = [
    "channel_stats",
    "merge_moments",
    "normalize",
    "backward_reduce",
    "merge_gradients",
    "backward_input",
]
INPUTS = ("contiguous", "channels-last", "small")
# Instructions per bf16 element that a memory-bound kernel can afford: an H200 issues about 15 in
# the time it moves one (132 SMs of 128 lanes at 1.98 GHz, 4.3 TB/s), and half of that is ours.
BUDGET = {"channel_stats": 8, "normalize": 8, "backward_reduce": 11, "backward_input": 13}
# Inputs whose rows no 16-byte load can be made of.
UNALIGNED = ("long odd rows", "small")
# 24 positions of 65 channels are the largest flat tile that is a multiple of a load, and leave a
# quarter of its lanes idle.
IDLE = ("65 channels, channels-last",)
REPRESENTATIVE = ("contiguous", "channels-last", "2-D", "rows of 49", "24 channels, channels-last")


def costs(*arguments: str) -> list[dict[str, Any]]:
    """Rows of the cost report, from a process that does not interpret."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--json", *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_compiles_without_spilling(target: str) -> None:
    rows = costs("--targets", target, "--inputs", *INPUTS, "--dtypes", "bfloat16")
    assert not [row for row in rows if row["spilled"]]
    # Two launches in each direction, and one more where the reduction is split.
    launched = {name: [r["kernel"] for r in rows if r["input"] == name] for name in INPUTS}
    assert launched["contiguous"] == launched["channels-last"] == KERNELS
    assert launched["small"] == [name for name in KERNELS if not name.startswith("merge")]


def check_budget(rows: list[dict[str, Any]]) -> None:
    """Full-width loads and stores, and few enough registers and instructions, in every row."""
    for row in (row for row in rows if row["kernel"] in BUDGET):
        assert row["load_bits"] == 128, row
        assert row["store_bits"] in (0, 128), row
        assert row["registers"] <= 128, row
        idle = 2048 / 1560 if row["input"] in IDLE else 1
        assert 0 < row["instructions_per_element"] <= BUDGET[row["kernel"]] * idle, row


@pytest.mark.timeout(300)
def test_half_precision_keeps_to_the_budget() -> None:
    check_budget(costs("--inputs", *REPRESENTATIVE, "--dtypes", "bfloat16"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_half_precision_keeps_to_the_budget_for_every_input() -> None:
    rows = costs("--dtypes", "bfloat16", "float16")
    check_budget([row for row in rows if row["input"] not in UNALIGNED])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_dtype_and_layout_compiles(target: str) -> None:
    rows = costs("--targets", target, "--inputs", *REPRESENTATIVE, *UNALIGNED)
    assert {row["kernel"] for row in rows} == set(KERNELS)
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16", "float32", "float64"}
    # Sums over channels, after the loop, may spill a few registers; the loop itself may not.
    assert not [row for row in rows if row.get("loop_spills", row["spilled"])]
    assert max(row["spilled"] for row in rows if row["dtype"] != "float64") <= 64


def test_refuses_to_compile_under_the_interpreter() -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "TRITON_INTERPRET=1 is set" in run.stderr
