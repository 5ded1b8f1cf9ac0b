"""`bench/on_gpu.py` runs each part on its own, and keeps what was found where one fails."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import on_gpu
from gpu_records import figure, parse

BENCH = Path(on_gpu.__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing() -> None:
    command = [sys.executable, str(BENCH / "on_gpu.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert "needs a GPU" in run.stderr
    assert not run.stdout


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What each write of results holds; on a device that is made up, with parts that are."""
    scripts = {
        "parity": 'print(\'{"expected": 3}\\n{"ok": true, "case": "a"}\')\nraise KeyError(\'b\')',
        "speed": "print('noise')\nprint('{\"ok\": true}')",
        "tuning": "import time\nprint('{\"ok\": true}', flush=True)\ntime.sleep(60)",
    }
    for name, code in scripts.items():
        tmp_path.joinpath(f"{name}.py").write_text(code)
    parts = {n: on_gpu.Part(((str(tmp_path / f"{n}.py"),),), 2.5) for n in scripts}
    monkeypatch.setattr(on_gpu, "PARTS", parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    described = {"device": "A GPU", "torch": "2", "triton": "3"}
    monkeypatch.setattr(on_gpu, "describe", lambda device: described)
    results: list[dict[str, Any]] = []
    write = on_gpu.write

    def write_and_read(path: Path, result: dict[str, Any]) -> None:
        write(path, result)
        results.append(json.loads(path.read_text()))

    monkeypatch.setattr(on_gpu, "write", write_and_read)
    return results


def test_a_part_that_fails_is_told_and_the_others_run(
    written: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_gpu.main(["--results", str(tmp_path / "results")]) == 1
    assert [list(result["parts"]) for result in written] == [
        ["parity"],
        ["parity", "speed"],
        ["parity", "speed", "tuning"],
    ]
    parity, speed, tuning = written[-1]["parts"].values()
    assert [part["ok"] for part in (parity, speed, tuning)] == [False, True, False]
    assert parity["records"] == [{"ok": True, "case": "a"}]
    assert "KeyError: 'b'" in parity["errors"][0]["stderr"]
    assert tuning["errors"][0]["error"] == "not done in time"
    assert tuning["records"] == [{"ok": True}]
    out = capsys.readouterr().out
    assert "KeyError: 'b'" in out
    assert "2 were not reached" in out
    assert "no ratios: parity failed" in out
    assert "failed: parity, tuning" in out
    (path,) = (tmp_path / "results").iterdir()
    assert path.name.endswith("_A-GPU.json")


def test_parts_can_be_chosen(written: list[dict[str, Any]], tmp_path: Path) -> None:
    assert on_gpu.main(["--parts", "speed", "--results", str(tmp_path)]) == 0
    assert list(written[-1]["parts"]) == ["speed"]


def test_every_part_has_a_script() -> None:
    scripts = [command[0] for part in on_gpu.PARTS.values() for command in part.commands]
    assert all((BENCH / script).exists() for script in scripts)


def test_records_outlive_what_surrounds_them() -> None:
    assert parse('noise\n{"ok": true}\n[1]\n{"ok": fal') == [{"ok": True}]
    assert (figure(0.123456), figure(math.inf)) == (0.1235, "inf")


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, multi_processor_count = "A GPU", 1, 2

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    described = on_gpu.describe(0)
    assert described["device"] == "A GPU"
    json.dumps(described)
    assert on_gpu._output("no-such-program") is None
    assert on_gpu._output(sys.executable, "-c", "raise SystemExit(1)") is None
