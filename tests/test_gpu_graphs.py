"""`bench/gpu_graphs.py` compares replays with eager steps, here of a function for a graph."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_stand_ins import CPU, TINY
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import gpu_graphs
from gpu_cases import CONTIGUOUS, LAST


def replayed_by_running(step: gpu_graphs.Step) -> tuple[list[Tensor], Callable[[], None]]:
    outputs = step()

    def replay() -> None:
        for output, new in zip(outputs, step(), strict=True):
            output.copy_(new)

    return outputs, replay


def test_replays_are_compared_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {"image": (TINY, LAST), "empty": ((0, 3, 4), CONTIGUOUS)}
    monkeypatch.setattr(gpu_graphs, "CASES", cases)
    expected, *records = gpu_graphs.records(CPU, replayed_by_running)
    assert expected == {"expected": 4}
    assert [r["ok"] for r in records] == [True] * 4, records

    def never_replayed(step: gpu_graphs.Step) -> tuple[list[Tensor], Callable[[], None]]:
        return step(), lambda: None

    _, image, *_ = gpu_graphs.records(CPU, never_replayed)
    everything = {"y", "dx", "dw", "db", "running_mean", "running_var", "num_batches_tracked"}
    assert set(image["failed"]) == everything
