"""The demo as a user runs it: by its command, in processes of its own."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from syncbn_triton.demo import launch
from syncbn_triton.demo.__main__ import main
from syncbn_triton.demo.train import Arm, Outcome

DEMO = ("-m", "syncbn_triton.demo", "--epochs", "1", "--max-steps", "12")


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, without the suite's own choice of backend."""
    names = ("TRITON_INTERPRET", "SYNCBN_TRITON_BACKEND")
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.timeout(120)
def test_three_arms_are_trained_reported_and_drawn(tmp_path: Path) -> None:
    run = run_python(tmp_path, *DEMO, "--seed", "3", "--out", "results")

    assert run.returncode == 0, run.stderr
    for arm in (
        "(a) DDP 2 x 4 images, SyncBatchNorm",
        "(b) 1 x 8 images, nn.BatchNorm2d",
        "(c) DDP 2 x 4 images, nn.BatchNorm2d",
    ):
        assert arm in run.stdout
        assert f"{arm}: " in run.stderr, "no progress was shown"
    assert "PASSED" in run.stdout
    png = (tmp_path / "results" / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert png.endswith(b"IEND\xaeB`\x82")

    result = json.loads((tmp_path / "results" / "result.json").read_text())
    assert result["config"] == {
        "world_size": 2,
        "batch_per_rank": 4,
        "epochs": 1,
        "seed": 3,
        "max_steps": 12,
    }
    assert result["versions"].keys() == {"syncbn_triton", "torch", "triton", "python"}
    assert result["backend"] == "aten"
    assert result["verdict"] == "passed"
    assert result["compared_steps"] == 12
    losses = {name: arm["losses"] for name, arm in result["arms"].items()}
    for name in ("a", "c"):
        largest = max(abs(x - b) for x, b in zip(losses[name], losses["b"], strict=True))
        assert result["largest_difference"][name] == largest
    assert result["largest_difference"]["a"] <= 1e-4
    # Half the batch has other statistics: the comparison can tell.
    assert result["largest_difference"]["c"] > 1e-2


@pytest.mark.timeout(120)
def test_torchruns_ranks_are_used(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    run = run_python(tmp_path, *torchrun, *DEMO)

    assert run.returncode == 0, run.stderr
    assert run.stdout.count("PASSED") == 1
    result = json.loads((tmp_path / "demo-output" / "result.json").read_text())
    assert result["config"]["world_size"] == 3


FAILING = """
import sys
import torch.distributed as dist
from syncbn_triton.demo.__main__ import main
from syncbn_triton.demo.network import Network

forward = Network.forward

def fails_on_rank_1(self, images):
    if dist.is_initialized() and dist.get_rank() == 1:
        raise RuntimeError("rank 1 is out of luck")
    return forward(self, images)

# Each rank imports this file anew, and with it the failure.
Network.forward = fails_on_rank_1

if __name__ == "__main__":
    sys.exit(main([]))
"""


@pytest.mark.timeout(120)
def test_a_rank_that_fails_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    run = run_python(tmp_path, "failing.py")

    assert run.returncode == 1
    assert "in fails_on_rank_1" in run.stderr
    assert "RuntimeError: rank 1 is out of luck" in run.stderr
    assert "PASSED" not in run.stdout


@pytest.mark.parametrize(("apart", "status"), [(0.9e-4, 0), (1.1e-4, 1), (math.nan, 1)])
def test_the_exit_status_is_that_of_the_comparison(
    apart: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arms = {"a": Arm([2.0, 1.0 + apart], 0.9), "b": Arm([2.0, 1.0], 0.9), "c": Arm([2.0, 3.0], 0.9)}
    monkeypatch.setattr(launch, "run", lambda config: Outcome(arms, "CPU", "aten"))

    assert main(["--out", str(tmp_path)]) == status
    assert ("FAILED" if status else "PASSED") in capsys.readouterr().out


@pytest.mark.parametrize("package", ["sklearn", "matplotlib", "tqdm"])
def test_a_missing_extra_is_answered_with_the_command_that_installs_it(
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    assert main(["--out", str(tmp_path)]) == 1
    error = f'The demo needs {package}: pip install "syncbn-triton[demo]"\n'
    assert capsys.readouterr().err == error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "0"], "argument --world-size: expected an integer from 1 (got '0')"),
        (["--epochs", "1.5"], "argument --epochs: expected an integer from 1 (got '1.5')"),
        (["--seed", "-1"], "argument --seed: expected an integer from 0 (got '-1')"),
        (["--batch-per-rank", "701"], "expected 2 to 1400 images a step (got 2 x 701 images)"),
        (["--out", __file__], "--out: [Errno 17] File exists"),
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_a_world_size_other_than_torchruns_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as exit:
        main(["--world-size", "2"])
    assert exit.value.code == 2
    assert "--world-size 2 under torchrun, which has 3" in capsys.readouterr().err
