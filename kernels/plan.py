"""A kernel's launch, worked out once for tensors of one shape and kept for the next.

Triton's own way to a launch, ``kernel[grid](...)``, binds and specialises every argument anew. A
plan holds all arguments but the pointers, and the compiled kernel itself for each kind of pointers.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from .blocks import Cut
from .layout import View

Make = TypeVar("Make", bound=Callable[..., Any])

# Plans kept for each kernel: a few hundred bytes each, the oldest dropped.
_KEPT = 1024
_caches: list[Any] = []


class Plan:
    """One kernel, and how it is launched over one grid."""

    def __init__(
        self,
        kernel: Any,
        grid: int,
        device: torch.device,
        integers: tuple[int, ...],
        constants: dict[str, Any],
        num_warps: int = 4,
        copied: tuple[bool, ...] = (),
    ) -> None:
        self._kernel = kernel
        self._grid = (grid, 1, 1)
        self._device = device
        self._integers = integers
        self._constants = tuple(constants[n] for n in kernel.arg_names if n in constants)
        self._num_warps = num_warps
        self._copied = copied if any(copied) else ()
        self._compiled: dict[Any, Callable[..., None]] = {}

    @classmethod
    def over(
        cls,
        kernel: Any,
        v: View,
        cut: Cut,
        dtype: torch.dtype,
        device: torch.device,
        **constants: Any,
    ) -> "Plan":
        """The plan of a kernel that walks a view cut into tiles, of elements of this dtype."""
        integers = (*cut.sizes, *chain.from_iterable(v.strides))
        # Computed in fp32, fp64 for fp64.
        constants["ACC"] = tl.float64 if dtype == torch.float64 else tl.float32
        constants["TILE"] = cut.tile
        return cls(kernel, cut.grid, device, integers, constants, cut.num_warps, v.copied)

    def launch(self, *tensors: Tensor | None, scalars: tuple[float, ...] = ()) -> None:
        """Launches on these tensors, in the kernel's order, and scalars that Triton leaves open."""
        if _is_current(self._device):
            self._launch(tensors, scalars)
        else:
            # Triton launches on the current device.
            with torch.get_device_module(self._device).device(self._device):
                self._launch(tensors, scalars)

    def _launch(self, tensors: tuple[Tensor | None, ...], scalars: tuple[float, ...]) -> None:
        if self._copied:
            viewed = zip(tensors, self._copied, strict=False)
            copies = [t.contiguous() if t is not None and copy else t for t, copy in viewed]
            tensors = (*copies, *tensors[len(copies) :])
        arguments = (*tensors, *self._integers, *scalars, *self._constants)
        # All that a pointer is specialised on.
        kind = tuple([t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors])
        compiled = self._compiled.get(kind)
        if compiled is not None:
            compiled(*arguments)
            return
        # a * b + c contracts to one fused multiply-add: faster, and rounded once.
        launched = self._kernel[self._grid](
            *arguments, num_warps=self._num_warps, enable_fp_fusion=True
        )
        if _depends_on_alignment_alone(launched):
            self._compiled[kind] = launched[self._grid]


def planned(make: Make) -> Make:
    """Keeps what a function of shapes, strides and dtypes made, up to a bound."""
    cached: Any = lru_cache(_KEPT)(make)
    _caches.append(cached)
    return cached


def forget_plans() -> None:
    """Drops all plans, so that the next launches choose their block sizes anew."""
    for cached in _caches:
        cached.cache_clear()


def _is_current(device: torch.device) -> bool:
    return device.type == "cpu" or torch.get_device_module(device).current_device() == device.index


def _depends_on_alignment_alone(compiled: Any) -> bool:
    """Whether another launch on pointers of the same kind would compile to the same.

    Not under the interpreter, which compiles nothing, nor where Triton specialises on more (on AMD,
    the size of a tensor's storage), nor if a release moves what is read here.
    """
    try:
        attributes = [a for attrs in compiled.src.attrs.values() for a in attrs]
    except AttributeError:
        return False
    return all(list(attribute) == ["tt.divisibility", 16] for attribute in attributes)
