"""What the host does for a launch: as little as possible, and what Triton itself would do."""

import json
import os
import subprocess
import sys
from pathlib import Path

from syncbn_triton.kernels import plan

HERE = Path(__file__).parent


def run_compiled(*command: str) -> str:
    """What a Python process prints in which kernels are compiled, not interpreted."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_kept_kernels() -> None:
    options = ("--noconftest", "-q", "-p", "no:cacheprovider")
    print(run_compiled("-m", "pytest", *options, str(HERE / "host_path_cases.py")))


def test_plans_are_bounded() -> None:
    made = plan.planned(lambda shape: object())
    kept = made((1,))
    assert made((1,)) is kept
    for n in range(2 * plan._KEPT):
        made((n,))
    assert made.cache_info().currsize == plan._KEPT
    plan.forget_plans()
    assert made.cache_info().currsize == 0


def test_an_unknown_result_of_a_launch_is_not_kept() -> None:
    """The interpreter returns None, and a later release may return something else."""
    assert not plan._depends_on_alignment_alone(None)
    assert not plan._depends_on_alignment_alone(object())


def test_host_time() -> None:
    """Ratios of times taken in turns; the layer is synchronized with nobody."""
    least = json.loads(run_compiled(str(HERE.parent / "bench" / "host_time.py"), "--json"))
    assert least["SyncBatchNorm"] <= 3 * least["nn.BatchNorm2d"], least
    for name in least:
        if name.endswith(", planned"):
            by_triton = least[name.replace("planned", "by Triton")]
            assert least[name] <= 0.75 * by_triton, least
