"""`bench/gpu_speed.py` times layers that agree, here with stand-ins and a constant for a clock."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from gpu_stand_ins import CPU, TINY

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import gpu_speed
from gpu_cases import CONTIGUOUS, LAST
from gpu_table import share_of_copy, speed_up, summary
from shapes import Shape


class FixedTimer:
    """Says that every call takes as long as its contestant is called."""

    def __init__(self) -> None:
        self.calls = 0

    def device_ms(self, call: Callable[[], object], host_ms: float) -> float:
        assert host_ms == 0.5
        call()
        self.calls += 1
        return 2.0 if "copy" in repr(call) else 4.0

    def host_ms(self, call: Callable[[], object]) -> float:
        call()
        return 0.5


@pytest.mark.usefixtures("operators")
def test_every_contestant_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, turns in (("_WARM_UP", 1), ("_LEAST_ROUNDS", 2), ("_MOST_ROUNDS", 2)):
        monkeypatch.setattr(f"gpu_timer.{name}", turns)
    shapes = [
        (Shape("image", (2, 5, 3, 4), ""), LAST, torch.bfloat16),
        (Shape("rows", (7, 11), ""), CONTIGUOUS, torch.float32),
        (Shape("empty", (0, 3, 4), ""), CONTIGUOUS, torch.float32),
    ]
    cases = [gpu_speed.Case(*shape) for shape in shapes]
    records = list(gpu_speed.records(cases, CPU, FixedTimer(), 60))
    assert all(r["ok"] for r in records), records
    assert [r.get("skipped") for r in records] == [None, None, "empty: nothing moves"]
    image = records[0]
    assert image["format"] == "channels-last"
    assert image["bytes"] == 2 * 2 * 5 * 3 * 4
    assert {what: set(who) for what, who in image["times"].items()} == {
        "copy": {"torch"},
        "channel_stats": {"ours", "torch"},
        "normalize": {"ours", "torch"},
        "backward_reduce": {"ours", "torch"},
        "backward_input": {"ours", "torch"},
        "forward": {"ours", "torch", "native"},
        "backward": {"ours", "torch", "native"},
    }
    assert image["rounds"] == 2
    assert speed_up(image, "forward", "native") == 1
    # Two reads and a write, against one of each in half the time.
    assert share_of_copy(image, "forward") == 0.75
    lines = list(summary("speed", json.loads(json.dumps(records)), True))
    assert lines[0] == "speed: 2 passed, 0 failed, 1 skipped"
    assert sum("geometric mean of 1 inputs" in line for line in lines) == 2
    assert not any("geometric" in line for line in summary("speed", records, False))


@pytest.mark.usefixtures("operators")
def test_layers_that_disagree_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "batch_norm_elemt", lambda x, *_: 2 * x)
    case = gpu_speed.Case(Shape("image", TINY, ""), CONTIGUOUS, torch.float32)
    (record,) = gpu_speed.records([case], CPU, FixedTimer(), 60)
    assert not record["ok"]
    assert "y by torch" in record["error"]


def test_a_case_without_time_is_named() -> None:
    case = gpu_speed.Case(Shape("image", TINY, ""), CONTIGUOUS, torch.float32)
    (record,) = gpu_speed.records([case], CPU, FixedTimer(), -1)
    assert record["skipped"] == "no time left"
    assert "image" in list(summary("speed", [record], None))[-1]


def test_every_case_is_compiled_by_a_step() -> None:
    case = gpu_speed.Case(Shape("image", TINY, ""), LAST, torch.bfloat16)
    with mock.patch.object(gpu_speed.SyncBatchNorm, "forward", autospec=True) as forward:
        forward.side_effect = lambda layer, x: F.batch_norm(x.float(), None, None, training=True)
        gpu_speed.compile_case(case, "cpu")
    (x,) = (call.args[1] for call in forward.call_args_list)
    assert x.shape == TINY
    assert x.dtype == x.grad.dtype == torch.bfloat16
    assert x.is_contiguous(memory_format=LAST)


def test_the_suite_is_timed_in_both_formats_and_dtypes() -> None:
    abouts = [str(case.about()) for case in gpu_speed.cases()]
    assert len(set(abouts)) == len(abouts)
    assert {case.dtype for case in gpu_speed.cases()} == {torch.bfloat16, torch.float32}
