"""Set-up shared by all tests."""

import os

# Read when a kernel is decorated, so set before the first import of one.
os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator

import pytest
import torch
from gpu_stand_ins import STAND_INS
from ranks import RankPool

from syncbn_triton.backend import VARIABLE, backend_for


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's pool of ranks."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(params=["aten", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test with each implementation, the kernels under the interpreter."""
    monkeypatch.setenv(VARIABLE, request.param)
    backend_for.cache_clear()
    yield request.param
    backend_for.cache_clear()


@pytest.fixture
def aten(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's operators, but in tests of each backend: interpreted kernels would take minutes."""
    if "backend" in request.fixturenames:
        yield
        return
    monkeypatch.setenv(VARIABLE, "aten")
    backend_for.cache_clear()
    yield
    backend_for.cache_clear()


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operators for GPUs, played on the CPU."""
    for stand_in in STAND_INS:
        monkeypatch.setattr(torch, stand_in.__name__, stand_in)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_report_header() -> str:
    return "kernels: interpreted on the CPU; nothing in this run used a GPU"
