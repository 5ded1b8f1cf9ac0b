"""Every Python block of the documents runs, in a namespace that holds what the text presupposes.

A block runs as on a machine without a GPU, in a process group of one, unless it makes one itself:
then under the variables that torchrun sets. ``<!-- needs: timm, lightning -->`` above a block names
packages; without them it is skipped, or runs against a minimal copy of the registry it uses.
"""

import gc
import importlib.util
import os
import re
import socket
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from syncbn_triton import operations

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- needs: ([^\n]*) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass
class Block:
    """A Python block, and where it stands."""

    document: Path
    line: int
    needs: list[str]
    code: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text()
        for match in BLOCK.finditer(text):
            needs = match[1].split(", ") if match[1] else []
            found.append(Block(document, text.count("\n", 0, match.start(2)), needs, match[2]))
    return found


class Registry(dict[str, type[nn.Module]]):
    """As mmengine's."""

    def register_module(self, name: str, force: bool = False, *, module: type[nn.Module]) -> None:
        if name in self and not force:
            raise KeyError(f"{name} is already registered")
        self[name] = module


def mmcv() -> dict[str, dict[str, Any]]:
    """What norms are built by in mmcv 2, ``mmcv/cnn/bricks/norm.py``."""
    registry = Registry(SyncBN=nn.SyncBatchNorm)

    def build_norm_layer(cfg: dict[str, Any], C: int, postfix: int) -> tuple[str, nn.Module]:
        cfg = {"eps": 1e-5, **cfg}
        cls, requires_grad = registry[cfg.pop("type")], cfg.pop("requires_grad", True)
        assert issubclass(cls, nn.modules.batchnorm._BatchNorm)
        return f"bn{postfix}", cls(C, **cfg).requires_grad_(requires_grad)

    return {
        "mmcv.cnn": {"build_norm_layer": build_norm_layer},
        "mmengine.registry": {"MODELS": registry},
    }


def detectron2() -> dict[str, dict[str, Any]]:
    """Of ``detectron2/layers/batch_norm.py``, what it does with a callable."""
    return {"detectron2.layers": {"get_norm": lambda norm, channels: norm(channels)}}


# Modules for packages that are rarely installed, by what they hold.
COPIES = {"mmcv": mmcv, "detectron2": detectron2}


def provide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips, or puts in a copy, where a package is not installed."""
    if importlib.util.find_spec(package) is not None:
        return
    if package not in COPIES:
        pytest.skip(f"needs the package {package}")
    for path, content in COPIES[package]().items():
        for name in (path.partition(".")[0], path):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(content)


def as_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the only process of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def presupposed() -> dict[str, Any]:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )
    dataset = TensorDataset(torch.randn(8, 3, 6, 6), torch.randint(2, (8,)))
    loader = DataLoader(dataset, batch_size=4)
    return {
        "__name__": "__main__",
        "torch": torch,
        "model": model,
        "device": torch.device("cpu"),
        "dataset": dataset,
        "loader": loader,
    }


def run(block: Block, namespace: dict[str, Any]) -> None:
    """Runs a block in a namespace; errors point to the document's line."""
    code = "\n" * block.line + block.code
    exec(compile(code, str(block.document), "exec"), namespace)


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_block(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in block.needs:
        provide(package, monkeypatch)
    monkeypatch.chdir(tmp_path)
    # Without a GPU, no reader waits for interpreted kernels.
    monkeypatch.setattr(operations, "backend_for", lambda device_type: "aten")
    with warnings.catch_warnings():
        if block.needs:
            # Other packages' warnings are theirs, but a model that is not converted is ours.
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".*a forward of its own")
        if "init_process_group" in block.code:
            as_torchrun(monkeypatch)
        else:
            store = dist.FileStore(str(tmp_path / "store"), 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        namespace = presupposed()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(dist, "destroy_process_group", lambda: None)
                run(block, namespace)
            if "convert_sync_batchnorm(model" in block.code:
                classes = {type(layer).__module__ for layer in namespace["model"].modules()}
                assert "torch.nn.modules.batchnorm" not in classes
        finally:
            # A DistributedDataParallel that outlives its process group may deadlock as it goes.
            namespace.clear()
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
            if "accelerate" in sys.modules:
                # It keeps what it found of the process group.
                sys.modules["accelerate"].state.AcceleratorState._reset_state(True)


def test_each_document_has_blocks() -> None:
    """Else the pattern no longer finds them."""
    for document in DOCUMENTS:
        expected = document.read_text().count("```python\n")
        assert sum(block.document == document for block in blocks()) == expected > 0


@pytest.mark.slow
def test_the_script_runs_under_torchrun(tmp_path: Path) -> None:
    (script,) = (b.code for b in blocks() if b.code.startswith("# train.py"))
    (tmp_path / "train.py").write_text(script)
    # A file a rank: what two processes print to one pipe may mix within a line.
    logs = tmp_path / "logs"
    arguments = ["--standalone", "--nproc-per-node", "2"]
    arguments += ["--log-dir", str(logs), "--redirects", "1", "train.py"]
    names = ("TRITON_INTERPRET", "SYNCBN_TRITON_BACKEND")
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (first, second) = (path.read_text() for path in sorted(logs.rglob("stdout.log")))
    assert first.removeprefix("0 ") == second.removeprefix("1 ")
    assert first.startswith("0 tensor(")
