"""What is built and installed: the packages with their data, and nothing else."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import syncbn_triton

ROOT = Path(__file__).parents[1]
# Folders of the source tree, by the name of the package that they are installed as.
SOURCES = {"syncbn_triton/kernels": ROOT / "kernels", "syncbn_triton": ROOT / "syncbn_triton"}
# Kept in a copy of the tree, so that a build has the chance to take up what it should not.
COPIED = ("bench", "docs", "kernels", "syncbn_triton", "tests")
NAME = f"syncbn_triton-{syncbn_triton.__version__}"
METADATA = ("licenses/LICENSE", "METADATA", "RECORD", "WHEEL", "top_level.txt")

STEP = """
import importlib.metadata, json, torch
import syncbn_triton
from syncbn_triton.kernels import tables

layer = syncbn_triton.SyncBatchNorm(4, activation="relu")
x = torch.randn(8, 4, 3, 3, requires_grad=True)
layer(x).square().sum().backward()
print(json.dumps({
    "file": syncbn_triton.__file__,
    "kernels": tables.__file__,
    "version": importlib.metadata.version("syncbn-triton"),
    "seen": int(layer.num_batches_tracked),
    "gradient": bool(x.grad.isfinite().all() and x.grad.any()),
}))
"""


def setuptools_is_new_enough() -> bool:
    """Whether a build needs no download; the least version is that of pyproject.toml."""
    try:
        return int(version("setuptools").partition(".")[0]) >= 77
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not setuptools_is_new_enough(), reason="needs setuptools 77 or newer"),
]


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """The output of a command, which must succeed."""
    ours = ("SYNCBN_TRITON_", "TRITON_INTERPRET", "PYTHON")
    environment = {n: v for n, v in os.environ.items() if not n.startswith(ours)}
    result = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    """Builds a wheel or an sdist by the hook that pip and build call, without their isolation."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (built,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in COPIED:
        shutil.copytree(ROOT / name, source / name)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    # A table that would be shipped, and what lies about.
    (source / "kernels" / "configs" / "A_GPU.jsonl").write_text("")
    (source / "kernels" / "configs" / "notes.txt").write_text("")
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as by who installs from it."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return build("wheel", unpacked / NAME, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel, and sees the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-I", "-c", code, cwd=folder).strip())
    # Of this folder's own .pth files none is read: an editable install does not come along.
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (packages / "outside.pth").write_text("".join(f"{path}\n" for path in paths))
    return python


def expected_files() -> set[str]:
    """Modules, the marker of types, and tables."""
    files = {"syncbn_triton/py.typed", "syncbn_triton/kernels/configs/A_GPU.jsonl"}
    for package, folder in SOURCES.items():
        files |= {f"{package}/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
        tables = (folder / "configs").glob("*.jsonl")
        files |= {f"{package}/configs/{path.name}" for path in tables}
    return files


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
    metadata = {f"{NAME}.dist-info/{name}" for name in METADATA}
    assert files - metadata == expected_files()
    assert metadata <= files
    assert wheel.name == f"{NAME}-py3-none-any.whl"


def test_the_sdist_holds_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {Path(m.name).relative_to(NAME) for m in archive if m.isfile()}
    assert {Path("LICENSE"), Path("README.md"), Path("pyproject.toml")} <= files
    assert not {"docs", "bench", ".venv", "__pycache__"} & {part for f in files for part in f.parts}


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{NAME}.dist-info/METADATA").decode()
        top_level = archive.read(f"{NAME}.dist-info/top_level.txt").decode().split()
    # A top-level package named kernels would overwrite Hugging Face's.
    assert top_level == ["syncbn_triton"]
    head, _, readme = metadata.partition("\n\n")
    assert "Name: syncbn-triton\n" in head
    assert f"Version: {syncbn_triton.__version__}\n" in head
    assert "Requires-Python: >=3.10\n" in head
    assert readme.strip() == (ROOT / "README.md").read_text().strip()
    required = [line for line in head.split("\n") if line.startswith("Requires-Dist: ")]
    assert [line for line in required if "extra ==" not in line] == ["Requires-Dist: torch>=2.10"]


@pytest.mark.parametrize("backend", ["aten", "triton"])
def test_the_installed_layer_trains(installed: Path, tmp_path: Path, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    variables = {"SYNCBN_TRITON_BACKEND": backend}
    if backend == "triton":
        variables["TRITON_INTERPRET"] = "1"
    found = json.loads(run(installed, "-I", "-c", STEP, cwd=tmp_path, **variables))
    environment = installed.parents[1].resolve()
    for name in ("file", "kernels"):
        assert environment in Path(found[name]).resolve().parents
    assert found["version"] == syncbn_triton.__version__
    assert found["seen"] == 1
    assert found["gradient"]


def test_the_installed_demo_explains_itself(installed: Path, tmp_path: Path) -> None:
    assert "usage" in run(installed, "-I", "-m", "syncbn_triton.demo", "--help", cwd=tmp_path)


def test_check_wheel_contents_finds_nothing(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "check_wheel_contents", wheel, cwd=tmp_path)
