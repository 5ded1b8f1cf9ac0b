"""What stands in a model after fusion; each part knows what stood there before."""

import copy
import functools
import importlib
import re
from types import ModuleType
from typing import Any

from torch import Tensor, fx, nn

from ..activation import activate
from ..module import SyncBatchNorm

# Methods that copy or pickle in a way of their own, which would not know of a new class.
_COPIES = ("__reduce_ex__", "__reduce__", "__deepcopy__", "__copy__")


class FusedActivation(nn.Identity):
    """In the place of an activation that the layer before it applies."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.train(original.training)
        # In a tuple, so that it is no child.
        self.original = (original,)

    def extra_repr(self) -> str:
        return repr(self.original[0])


class ResidualSyncBatchNorm(SyncBatchNorm):
    """A layer that a sum and an activation were fused into, for residuals of any kind.

    A residual that is broadcast, of another dtype or not a tensor is added by the operator that
    the model had: ``added_in_place`` is None, or the operand, ``"output"`` or ``"residual"``, that
    took up the sum.
    """

    added_in_place: str | None = None

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None or _fits(input, residual):
            return super().forward(input, residual)
        plain = copy.copy(self)
        plain.activation = None
        y = plain(input)
        if self.added_in_place == "output":
            y = y.add_(residual)
        elif self.added_in_place == "residual":
            y = residual.add_(y)
        else:
            y = y + residual
        return activate(y, self.activation, self.negative_slope)


def _fits(input: Tensor, residual: Any) -> bool:
    if not isinstance(residual, Tensor):
        return False
    return residual.shape == input.shape and residual.dtype == input.dtype


def fuse_layer(layer: SyncBatchNorm, activation: str, negative_slope: float) -> None:
    """Gives a layer an activation."""
    own = vars(layer)
    own["before_fusion"] = {k: own[k] for k in ("activation", "negative_slope") if k in own}
    layer.activation, layer.negative_slope = activation, negative_slope


def is_fused(layer: nn.Module) -> bool:
    return "before_fusion" in vars(layer)


def add_residual(layer: SyncBatchNorm, added_in_place: str | None) -> None:
    """Makes a layer take the residual of a fused sum."""
    layer.__class__ = ResidualSyncBatchNorm
    vars(layer)["added_in_place"] = added_in_place


def unfuse_layer(layer: Any) -> None:
    """Makes a fused layer what it was."""
    own = vars(layer)
    before = own.pop("before_fusion")
    for name in ("activation", "negative_slope", "added_in_place"):
        own.pop(name, None)
    own.update(before)
    cls: Any = type(layer)
    if cls is ResidualSyncBatchNorm:
        layer.__class__ = SyncBatchNorm


def why_not_rewritten(owner: nn.Module) -> str | None:
    """Why a module cannot be given another forward, or None if it can."""
    cls = type(owner)
    if is_rewritten(owner):
        return "is rewritten already"
    if any(getattr(cls, name, None) is not getattr(object, name, None) for name in _COPIES):
        return "copies or pickles in a way of its own"
    if "isinstance" in cls.forward.__code__.co_names:
        # In a trace, an input is of no type that it is in a run.
        return "may choose by the type of its input"
    return None


def rewrite(owner: nn.Module, graph: fx.Graph) -> None:
    """Gives a module the forward of a graph, by a class derived from its own."""
    code = graph.python_code("self")
    names = tuple(
        (name, value.__name__ if isinstance(value, ModuleType) else value)
        for name, value in code.globals.items()
        if re.search(rf"\b{name}\b", code.src)
    )
    original: Any = type(owner)
    owner.__class__ = _rewritten_class(original, code.src, names)


def is_rewritten(module: nn.Module) -> bool:
    return "rewritten_from" in vars(type(module))


def restore(module: nn.Module) -> None:
    """Undoes `rewrite`."""
    module.__class__ = vars(type(module))["rewritten_from"]


@functools.cache
def _rewritten_class(original: Any, source: str, names: tuple[tuple[str, Any], ...]) -> type[Any]:
    """A class with a forward from source, in which modules are named by strings."""

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:  # noqa: N807
        reduced: Any = object.__reduce_ex__(self, protocol)
        return (_new, (original, source, names), *reduced[2:])

    namespace: dict[str, Any] = {
        name: importlib.import_module(value) if isinstance(value, str) else value
        for name, value in names
    }
    exec(compile(source, f"<fused {original.__qualname__}>", "exec"), namespace)
    members = {
        "forward": namespace["forward"],
        "rewritten_from": original,
        "__reduce_ex__": __reduce_ex__,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    return type(f"Fused{original.__name__}", (original,), members)


def _new(original: Any, source: str, names: tuple[tuple[str, Any], ...]) -> nn.Module:
    cls: Any = _rewritten_class(original, source, names)
    new: nn.Module = cls.__new__(cls)
    return new
