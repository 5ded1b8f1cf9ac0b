"""Models with batch norms into models with synchronized ones, and back."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.utils import parametrize

from .activation import activation_of
from .fusion.forwards import is_hooked
from .module import SyncBatchNorm

Module = TypeVar("Module", bound=nn.Module)

# Batch norms that apply F.batch_norm or torch's SyncBatchNorm, and then their drop and act.
_TIMMS = ("BatchNormAct2d", "SyncBatchNormAct")


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
    a warning, since its behaviour would be lost; but timm's ``BatchNormAct2d`` becomes a layer with
    its activation, if that is one that can be fused and nothing is dropped.

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
                activation = _activation_within(layer, original)
                if activation is not None:
                    synchronized.activation, synchronized.negative_slope = activation
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
            "normalizes as before",
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

    Raises:
        ValueError: A layer has an activation that its original class has not. Nothing has been
            changed.
    """

    def reverted(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, SyncBatchNorm):
            return layer
        original: Any = layer.converted_from or BatchNorm
        if issubclass(original, _LazyNormBase) and not isinstance(layer, _LazyNormBase):
            original = original.cls_to_become
        plain = _with_class(layer, original)
        vars(plain).pop("converted_from", None)
        for name in ("activation", "negative_slope"):
            vars(plain).pop(name, None)
        if not issubclass(original, nn.SyncBatchNorm):
            del plain.process_group
        return plain

    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm):
            _check_activation_reverts(name, layer)
    return _replace(module, reverted, {})


def _check_activation_reverts(name: str, layer: SyncBatchNorm) -> None:
    own = (layer.activation, layer.negative_slope)
    original = layer.converted_from or BatchNorm
    if layer.activation is not None and own != _activation_within(layer, original):
        raise ValueError(
            f"expected layers without an activation (got {layer.activation!r} in "
            f"{name or 'the layer'}): call unfuse_activations first"
        )


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
    if "forward" in vars(layer):
        return True
    return type(layer).forward not in known and _activation_within(layer, type(layer)) is None


def _activation_within(layer: nn.Module, original: Any) -> tuple[str | None, float] | None:
    """Name and negative slope of the activation in one of timm's layers, if it can be fused.

    None of other classes, and where the layer's children do more.
    """
    timms: list[Any] = [cls for cls in original.__mro__ if cls.__name__ in _TIMMS]
    if not timms or original.forward is not timms[0].forward:
        return None
    drop, act = getattr(layer, "drop", None), getattr(layer, "act", None)
    for child in (drop, act):
        if child is not None and ("forward" in vars(child) or is_hooked(child)):
            return None
    if drop is not None and type(drop) is not nn.Identity:
        return None
    return activation_of(act)
