"""Models with batch norms into models with synchronized ones, and back."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from .module import SyncBatchNorm

Module = TypeVar("Module", bound=nn.Module)


class BatchNorm(_BatchNorm):
    """A batch norm of any input rank: what a layer built as SyncBatchNorm reverts to."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def convert_sync_batchnorm(
    module: nn.Module, process_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Replaces every batch norm in a module by a `SyncBatchNorm`.

    A converted layer takes over all that the original held: the same parameter and buffer objects
    (an optimizer built before stays right), hooks, flags and attributes. A layer that stands in
    several places is converted once. A subclass with a ``forward`` of its own is left alone, with
    a warning, since its behaviour would be lost.

    Args:
        module: Converted in place, unless it is itself a batch norm.
        process_group: Ranks to synchronize with. None keeps the group of a layer that has one, and
            else means all.

    Returns:
        The module, or the new layer if it was itself a batch norm.
    """
    return convert(module, SyncBatchNorm, process_group)


def convert(
    module: nn.Module, to: type[SyncBatchNorm], process_group: dist.ProcessGroup | None
) -> nn.Module:
    """`convert_sync_batchnorm` to a given class."""

    def converted(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, _BatchNorm):
            return layer
        if not _forward_is_torchs(layer) and not isinstance(layer, SyncBatchNorm):
            warnings.warn(
                f"{type(layer).__qualname__} has a forward of its own and was not converted to "
                f"{to.__qualname__}: it normalizes by the batch of its own rank",
                stacklevel=2,
            )
            return layer
        synchronized = _with_class(layer, to)
        if not isinstance(layer, SyncBatchNorm):
            synchronized.converted_from = type(layer)
        if process_group is not None:
            synchronized.process_group = process_group
        else:
            synchronized.__dict__.setdefault("process_group", None)
        return synchronized

    return _replace(module, converted, {})


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Undoes `convert_sync_batchnorm`: every `SyncBatchNorm` becomes what it was before.

    A layer that was built as a `SyncBatchNorm` becomes a batch norm of any input rank. Parameters,
    buffers, hooks, flags and attributes are taken over, as in conversion.

    Args:
        module: Reverted in place, unless it is itself a `SyncBatchNorm`.

    Returns:
        The module, or the new layer if it was itself a `SyncBatchNorm`.
    """

    def reverted(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, SyncBatchNorm):
            return layer
        original: Any = layer.converted_from or BatchNorm
        if issubclass(original, _LazyNormBase) and not isinstance(layer, _LazyNormBase):
            original = original.cls_to_become
        plain = _with_class(layer, original)
        vars(plain).pop("converted_from", None)
        if not issubclass(original, nn.SyncBatchNorm):
            del plain.process_group
        return plain

    return _replace(module, reverted, {})


def _replace(
    module: nn.Module,
    replacement: Callable[[nn.Module], nn.Module],
    seen: dict[int, nn.Module],
) -> nn.Module:
    """Replaces each module of a tree by its replacement, one standing in several places once."""
    if id(module) not in seen:
        seen[id(module)] = new = replacement(module)
        for name, child in module._modules.items():
            if child is not None:
                new._modules[name] = _replace(child, replacement, seen)
    return seen[id(module)]


def _with_class(layer: nn.Module, to: type[Module]) -> Module:
    """A module of another class that takes over the state of a layer."""
    if isinstance(layer, _LazyNormBase) and not issubclass(to, _LazyNormBase):
        # Becomes the class asked for once its first input tells the number of channels.
        to = type(f"Lazy{to.__name__}", (_LazyNormBase, to), {"cls_to_become": to})
    parametrized = getattr(layer, "parametrizations", ())
    if not all(hasattr(to, name) for name in parametrized):
        # Parametrized attributes are properties of a class made for the one module.
        properties = {n: p for n, p in vars(type(layer)).items() if isinstance(p, property)}
        to = type(f"Parametrized{to.__name__}", (to,), properties)
    new = to.__new__(to)
    new.__dict__.update(layer.__dict__)
    return new


def _forward_is_torchs(layer: _BatchNorm) -> bool:
    return type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
