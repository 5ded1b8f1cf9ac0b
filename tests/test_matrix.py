"""Which pairs of versions are tried, and what is kept of them, without installing any."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import matrix
from matrix import Row, Wheel

CPU = Wheel("2.13.0+cpu", ("filelock", "sympy>=1.13.3"))
CUDA = Wheel("2.14.1", ("cuda-toolkit==13.0.3", "nvidia-nccl-cu13==2.30.7", "triton~=3.8.0"))
PYTEST_REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_passes" />
<testcase classname="tests.test_a" name="test_fails"><failure /></testcase>
<testcase classname="tests.test_a" name="test_is_skipped"><skipped /></testcase>
</testsuite></testsuites>"""


def test_a_cpu_build_is_tried_with_any_triton() -> None:
    assert matrix.judge(CPU, Wheel("3.6.0"), False) is None


def test_a_cuda_build_is_tried_only_if_asked_for() -> None:
    row = matrix.judge(CUDA, Wheel("3.8.0"), False)
    assert row is not None
    assert row.status == "skipped"
    assert "CUDA" in row.why
    assert matrix.judge(CUDA, Wheel("3.8.0"), True) is None


def test_what_torch_pins_is_refused_either_way() -> None:
    for cuda_allowed in (False, True):
        row = matrix.judge(CUDA, Wheel("3.6.0"), cuda_allowed)
        assert row is not None
        assert (row.status, row.why) == ("refused", "this torch requires triton~=3.8.0")


def test_counts(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(PYTEST_REPORT)
    assert matrix.counts(report) == (1, 1, ["tests.test_a::test_fails"])


def test_a_run_goes_on_where_another_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What passed is kept, what failed is tried again, a version that is missing says so."""
    tried: list[str] = []

    def look_up(name: str, version: str) -> Wheel:
        if version == "2.8":
            raise LookupError("No matching distribution found for torch==2.8.*")
        return CPU if name == "torch" else Wheel(f"{version}.0")

    def try_pair(torch: str, triton: str, tests: object, timeout: int, folder: Path) -> Row:
        tried.append(triton)
        if triton == "3.9.0":
            return Row(torch, triton, "failed", "1 failed, first test_a", passed=3)
        return Row(torch, triton, "passed", passed=4)

    monkeypatch.setattr(matrix, "look_up", look_up)
    monkeypatch.setattr(matrix, "try_pair", try_pair)
    versions = ["--torch", "2.8", "2.13", "newest", "--triton", "3.8", "3.9"]
    monkeypatch.setattr(sys, "argv", ["matrix", *versions, "--folder", str(tmp_path)])
    for expected in (["3.8.0", "3.9.0"], ["3.9.0"]):
        tried.clear()
        with pytest.raises(SystemExit, match="1"):
            matrix.main()
        assert tried == expected
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["missing", "passed", "failed"]
    printed = capsys.readouterr().out
    assert "No matching distribution" in printed
    assert "1 failed, first test_a" in printed
