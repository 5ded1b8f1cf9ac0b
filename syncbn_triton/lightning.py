"""The layer in Lightning: a plugin for its Trainer. Not imported by the package itself."""

import importlib
from importlib.util import find_spec
from typing import Any

from torch import nn

from .convert import convert_sync_batchnorm, revert_sync_batchnorm
from .groups import new_sync_groups

# Lightning under each of its names. Installing the first brings the second along, and classes of
# one are unknown to the other.
_PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _plugins_to_extend() -> tuple[Any, ...]:
    """Lightning's own plugin, from each package that is installed.

    Not its abstract LayerSync: beside ``sync_batchnorm=True``, a Trainer accepts only subclasses of
    its default plugin.
    """
    found = [
        importlib.import_module(f"{path}.plugins.layer_sync").TorchSyncBatchNorm
        for package, path in _PACKAGES.items()
        if find_spec(package) is not None
    ]
    if not found:
        raise ModuleNotFoundError(
            "syncbn_triton.lightning needs Lightning, under either of its names: "
            "`pip install lightning` or `pip install pytorch-lightning`",
            name="lightning",
        )
    return tuple(found)


class TritonSyncBatchNorm(*_plugins_to_extend()):  # type: ignore[misc]
    """Lets a Lightning Trainer synchronize batch norms by this package, for the time of a fit.

    What the Trainer does with a plugin depends on its strategy: ``"ddp"`` and ``"fsdp"`` apply it,
    those of one device and ``ModelParallelStrategy`` do not.

    Args:
        group_size: Consecutive ranks that synchronize with each other; divides the world size. None
            for all.

    Example::

        trainer = Trainer(sync_batchnorm=True, plugins=[TritonSyncBatchNorm()])
    """

    def __init__(self, group_size: int | None = None) -> None:
        self.group_size = group_size

    def apply(self, model: nn.Module) -> nn.Module:
        """Replaces every batch norm of the model; see `convert_sync_batchnorm`."""
        group = None if self.group_size is None else new_sync_groups(self.group_size)
        return convert_sync_batchnorm(model, group)

    def revert(self, model: nn.Module) -> nn.Module:
        """Restores the classes that were there before; see `revert_sync_batchnorm`."""
        return revert_sync_batchnorm(model)
