"""Which implementation runs, and what is said when none can."""

import os
import subprocess
import sys

import pytest

from syncbn_triton.backend import backend_for

STEP = (
    "import torch, syncbn_triton; syncbn_triton.SyncBatchNorm(3)(torch.randn(2, 3, 4)); "
    "import sys; print('triton' if 'triton.language' in sys.modules else 'aten')"
)


def step(**environment: str) -> subprocess.CompletedProcess[str]:
    """Runs one step in a new process under this environment alone."""
    names = ("TRITON_INTERPRET", "SYNCBN_TRITON_BACKEND")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, "-c", STEP],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_cpu_tensors_use_aten_and_leave_triton_alone() -> None:
    assert step().stdout.strip() == "aten"


def test_interpreted_kernels_run_on_cpu_tensors() -> None:
    assert step(TRITON_INTERPRET="1").stdout.strip() == "triton"
    assert step(TRITON_INTERPRET="1", SYNCBN_TRITON_BACKEND="aten").stdout.strip() == "aten"


def test_triton_cannot_be_forced_on_cpu_tensors() -> None:
    error = step(SYNCBN_TRITON_BACKEND="triton").stderr
    assert "RuntimeError: SYNCBN_TRITON_BACKEND=triton cannot run on CPU tensors" in error


def test_a_wrong_value_is_named() -> None:
    error = step(SYNCBN_TRITON_BACKEND="cuda").stderr
    assert "to be one of auto, triton, aten (got 'cuda')" in error


def test_gpu_tensors_use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCBN_TRITON_BACKEND", raising=False)
    backend_for.cache_clear()
    assert backend_for("cuda") == "triton"
    backend_for.cache_clear()


def test_gpu_tensors_without_triton_name_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    backend_for.cache_clear()
    with pytest.raises(RuntimeError, match="pip install triton"):
        backend_for("xpu")
    backend_for.cache_clear()
