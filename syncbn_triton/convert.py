"""Models with batch norms into models with synchronized ones, and back."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.utils import parametrize

from .module import SyncBatchNorm

Module = TypeVar("Module", bound=nn.Module)


class BatchNorm(_BatchNorm):
    """A batch norm of any input rank: what a layer built as SyncBatchNorm reverts to."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class LazySyncBatchNorm(_LazyNormBase, SyncBatchNorm):
    """A `SyncBatchNorm` whose first input tells the number of channels."""

    cls_to_become = SyncBatchNorm


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
        synchronized: Any = layer
        if not isinstance(layer, to):
            if _has_own_forward(layer):
                if not isinstance(layer, SyncBatchNorm):
                    left_alone.add(type(layer).__qualname__)
                return layer
            synchronized = _with_class(layer, to)
            if not isinstance(layer, SyncBatchNorm):
                # Of a parametrized layer, the class it was before.
                parametrized = parametrize.is_parametrized(layer)
                original = type(layer).__bases__[0] if parametrized else type(layer)
                synchronized.converted_from = original
        if process_group is not None:
            synchronized.process_group = process_group
        else:
            synchronized.__dict__.setdefault("process_group", None)
        return synchronized

    left_alone: set[str] = set()
    result = _replace(module, converted, {})
    for name in sorted(left_alone):
        warnings.warn(
            f"{name} has a forward of its own and was not converted to {to.__qualname__}: it "
            "normalizes by the batch of its own rank",
            stacklevel=3,
        )
    return result


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
        to = _lazy(to)
    if parametrize.is_parametrized(layer):
        # Its attributes are properties of a class made for it alone, which cannot be pickled.
        own = {
            name: value
            for name, value in vars(type(layer)).items()
            if isinstance(value, property) or name == "__getstate__"
        }
        to = type(f"Parametrized{to.__name__}", (to,), own)
    new = to.__new__(to)
    new.__dict__.update(layer.__dict__)
    hook: Any
    for hook in new._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)
    return new


def _lazy(to: type[Any]) -> type[Any]:
    if to is SyncBatchNorm:
        return LazySyncBatchNorm
    return type(f"Lazy{to.__name__}", (_LazyNormBase, to), {"cls_to_become": to})


def _has_own_forward(layer: _BatchNorm) -> bool:
    known = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    return type(layer).forward not in known or "forward" in vars(layer)
