"""`bench/gpu_parity.py` passes the interpreted kernels, and notices wrong ones."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_stand_ins import CPU, TINY
from oracle import Step
from rounding import assert_step_rounds

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import gpu_parity
from gpu_cases import CONTIGUOUS, LAST, Case, make_layer


# NumPy, in which the kernels are interpreted, warns of NaN.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parity_of_tiny_cases(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    half, single = ("bfloat16",), ("float32",)
    cases = [
        Case("channels-last", TINY, LAST),
        Case("formats differ", TINY, LAST, dy_format=CONTIGUOUS, dtypes=half),
        Case("half input alone", TINY, parameters=torch.float32, dtypes=half),
        Case("misaligned", TINY, shift=1, dtypes=single),
        Case("no parameters", TINY, weight=False, bias=False, momentum=None, dtypes=single),
        Case("mean", TINY, mean=1e4, weight=False, bias=False, y_error=2e-6, dtypes=single),
    ]
    monkeypatch.setattr(gpu_parity, "CASES", cases)
    monkeypatch.setattr(gpu_parity, "NOT_FINITE", {"contiguous": (TINY, CONTIGUOUS)})
    expected, *records = gpu_parity.records(dtype, CPU)
    assert len(records) == expected["expected"]
    assert not [r for r in records if not r["ok"]]
    assert all(r["share"] <= 1 for r in records if "share" in r)


def test_every_parity_case_has_a_name_of_its_own_and_values_enough() -> None:
    for dtype in gpu_parity.DTYPES:
        cases = [case for case in gpu_parity.CASES if dtype in case.dtypes]
        assert len(gpu_parity.checks(dtype)) == len(cases) + len(gpu_parity.NOT_FINITE) + 1
    assert all(math.prod(c.size) > c.size[1] for c in gpu_parity.CASES)


def test_samples_may_lie_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_cases._FAR", 2**12)
    assert gpu_parity.check_case(Case("far", TINY, far=True), torch.bfloat16, CPU)["ok"]


@pytest.mark.parametrize(
    ("launcher", "spoil", "worst"),
    [
        ("backward_input", lambda dx: dx * 1.05, "dx"),
        ("backward_input", lambda dx: dx * math.nan, "dx"),
        ("normalize", lambda result: (result[0] + 0.1, result[1]), "y"),
    ],
)
def test_parity_notices_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, launcher: str, spoil: Callable[[Any], Any], worst: str
) -> None:
    right = getattr(gpu_parity, launcher)
    monkeypatch.setattr(gpu_parity, launcher, lambda *args: spoil(right(*args)))
    record = gpu_parity.check_case(Case("spoilt", TINY), torch.float32, CPU)
    assert not record["ok"]
    assert "within tolerance" in record["failed"]
    assert record["worst"] == worst
    json.dumps(record, allow_nan=False)


def test_parity_notices_what_is_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parity, "backward_input", lambda x, *_: torch.empty_like(x).view_as(x))
    record = gpu_parity.check_case(Case("unwritten", TINY), torch.float32, CPU)
    assert record["worst"] == "dx"
    assert record["share"] == "nan"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_the_tolerance_is_that_of_the_test_suite(dtype: torch.dtype) -> None:
    x, dy = torch.randn(TINY).to(dtype), torch.randn(TINY).to(dtype)
    layer = make_layer(Case("", TINY), dtype)
    exact = gpu_parity.torch_step(layer, x, dy, torch.float64)
    for share, passes in ((0.98, True), (1.02, False)):
        for name in ("y", "dx", "grad_weight", "running_var"):
            step = Step(**vars(exact))
            off = torch.ones_like(getattr(step, name))
            setattr(step, name, getattr(exact, name) + off)
            bound = 1 / gpu_parity.shares_of_tolerance(step, layer, x, dy)[name]
            setattr(step, name, getattr(exact, name) + share * bound * off)
            assert (gpu_parity.shares_of_tolerance(step, layer, x, dy)[name] <= 1) == passes
            if passes:
                assert_step_rounds(step, layer, x, dy)
            else:
                with pytest.raises(AssertionError, match=name):
                    assert_step_rounds(step, layer, x, dy)
