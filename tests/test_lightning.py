"""The plugin for Lightning's Trainer, and a fit by it across two processes."""

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning_cases
import pytest
import torch
from lightning_cases import EPOCHS, PER_STEP, perceptron, samples
from ranks import RankPool
from torch import nn

from syncbn_triton import SyncBatchNorm

PLUGIN = "syncbn_triton.lightning"
# The name of each package, and the module of it that users import.
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def needed(package: str) -> None:
    """Skips unless a package is there; does not import it, which takes seconds."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}")


@pytest.fixture
def fresh_import(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The plugin's module is imported anew, with what the test puts into sys.modules."""
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    yield monkeypatch
    sys.modules.pop(PLUGIN, None)


def stand_in(monkeypatch: pytest.MonkeyPatch, package: str) -> type:
    """Lightning's default plugin, in a package that holds nothing else."""

    class TorchSyncBatchNorm:
        pass

    path = ""
    for part in f"{PACKAGES[package]}.plugins.layer_sync".split("."):
        path = f"{path}.{part}".lstrip(".")
        module = ModuleType(path)
        module.__spec__ = ModuleSpec(path, None)
        monkeypatch.setitem(sys.modules, path, module)
    sys.modules[path].TorchSyncBatchNorm = TorchSyncBatchNorm
    return TorchSyncBatchNorm


@pytest.mark.parametrize("installed", [["lightning"], ["pytorch_lightning"], list(PACKAGES)])
def test_the_plugin_is_known_to_each_package_that_is_there(
    fresh_import: pytest.MonkeyPatch, installed: list[str]
) -> None:
    for package in PACKAGES.keys() - installed:
        fresh_import.setitem(sys.modules, package, None)
    defaults = [stand_in(fresh_import, package) for package in installed]
    plugin = importlib.import_module(PLUGIN).TritonSyncBatchNorm()
    assert all(isinstance(plugin, default) for default in defaults)


def test_without_lightning_the_import_says_what_to_install(
    fresh_import: pytest.MonkeyPatch,
) -> None:
    for package in PACKAGES:
        fresh_import.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match="pip install lightning") as error:
        importlib.import_module(PLUGIN)
    assert error.value.name == "lightning"


def test_a_lightning_that_cannot_be_imported_is_not_taken_for_none(
    fresh_import: pytest.MonkeyPatch,
) -> None:
    """As where a package that Lightning itself needs is missing."""
    for package in PACKAGES:
        stand_in(fresh_import, package)
    fresh_import.setitem(sys.modules, "lightning.pytorch.plugins.layer_sync", None)
    with pytest.raises(ModuleNotFoundError, match="layer_sync"):
        importlib.import_module(PLUGIN)


def imported_on_rank(rank: int) -> list[str]:
    return [package for package in PACKAGES if package in sys.modules]


def test_the_package_itself_does_not_import_lightning(ranks: RankPool) -> None:
    """Asked of a process that imported all but the plugin."""
    assert ranks.run(1, imported_on_rank) == [[]]


def model_of_every_kind() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.GroupNorm(1, 3)
    )


def test_apply_and_revert(fresh_import: pytest.MonkeyPatch) -> None:
    stand_in(fresh_import, "lightning")
    fresh_import.setitem(sys.modules, "pytorch_lightning", None)
    plugin = importlib.import_module(PLUGIN).TritonSyncBatchNorm()
    model = model_of_every_kind()
    original, parameters = [type(layer) for layer in model], list(model.parameters())
    # A Trainer may fit more than once.
    for _ in range(2):
        assert plugin.apply(model) is model
        assert [type(layer) for layer in model] == [*[SyncBatchNorm] * 3, nn.GroupNorm]
        assert plugin.revert(model) is model
        assert [type(layer) for layer in model] == original
    # What the optimizer holds.
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def size_of_groups(rank: int, group_size: int | None) -> tuple[int | None, float]:
    """Ranks of the layer's group, and the mean of their ranks as the layer sees it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch, "lightning")
        monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
        plugin = importlib.import_module(PLUGIN).TritonSyncBatchNorm(group_size)
        sys.modules.pop(PLUGIN)
    layer: Any = plugin.apply(nn.BatchNorm1d(1, momentum=1.0))
    layer(torch.full((2, 1), float(rank)))
    size = None if layer.process_group is None else layer.process_group.size()
    return size, layer.running_mean.item()


@pytest.mark.parametrize(
    ("group_size", "expected"),
    [
        (None, [(None, 1.5)] * 4),
        (2, [(2, 0.5)] * 2 + [(2, 2.5)] * 2),
    ],
    ids=str,
)
def test_groups(ranks: RankPool, group_size: int | None, expected: list[Any]) -> None:
    assert ranks.run(4, size_of_groups, group_size) == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_a_trainer_accepts_the_plugin(package: str) -> None:
    """With ``sync_batchnorm=True`` beside it, and without."""
    needed(package)
    lightning: Any = importlib.import_module(PACKAGES[package])
    plugin = importlib.import_module(PLUGIN).TritonSyncBatchNorm()
    for sync_batchnorm in (True, False):
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            sync_batchnorm=sync_batchnorm,
            plugins=[plugin],
            logger=False,
            enable_checkpointing=False,
        )
        assert trainer.strategy._layer_sync is plugin


@pytest.mark.parametrize(
    "package", [pytest.param(name, marks=pytest.mark.slow) for name in PACKAGES]
)
def test_a_fit_across_ranks_equals_one_process(package: str, tmp_path: Path) -> None:
    needed(package)
    file = tmp_path / "state"
    names = ("TRITON_INTERPRET", "SYNCBN_TRITON_BACKEND")
    result = subprocess.run(
        [sys.executable, lightning_cases.__file__, PACKAGES[package], str(file)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in names},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        # Rank 0 has the even samples of a step, rank 1 the odd ones.
        for x in samples().split(PER_STEP):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(torch.load(file), model.state_dict(), rtol=1e-12, atol=1e-12)
