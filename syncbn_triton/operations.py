"""The four operations of the layer, registered with torch.

===============  ===============================================================================
channel_stats    x -> moments of this rank, packed, ``(2C + 1,)`` fp64
normalize        x, moments of all ranks -> y, and the statistics ``(3C + 1,)`` for backward;
                 updates the running statistics in place
backward_reduce  x, dy, statistics -> sums of this rank, packed, ``(2C,)`` fp64, and the gradients
                 of weight and bias, ``(C,)``, or ``(0,)`` for a layer without one
backward_input   x, dy, statistics, sums of all ranks -> dx
===============  ===============================================================================

An all-reduce of the packed tensor goes between the two of each direction. Registration makes an
operation opaque to ``torch.compile``, which sees its schema and the shapes its fake gives. The
packed tensors are described in ``syncbn_triton.kernels.packing``.
"""

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from . import aten
from .backend import backend_for
from .kernels.results import (
    empty_gradients,
    empty_like_input,
    empty_moments,
    empty_statistics,
)

Operation = TypeVar("Operation", bound=Callable[..., object])

_library = torch.library.Library("syncbn_triton", "DEF")


def _operation(schema: str, fake: Callable[..., object]) -> Callable[[Operation], Operation]:
    """Registers a function as the operation of this schema, and the fake beside it."""

    def register(function: Operation) -> Operation:
        name = function.__name__
        _library.define(name + schema)
        for device in ("CPU", "CUDA", "XPU"):
            _library.impl(name, function, device)
        torch.library.register_fake(f"syncbn_triton::{name}", fake, lib=_library)
        operation: Operation = getattr(torch.ops.syncbn_triton, name).default
        return operation

    return register


def _backend(x: Tensor) -> ModuleType:
    if backend_for(x.device.type) == "aten":
        return aten
    from .kernels import launchers

    return launchers


@_operation("(Tensor x) -> Tensor", fake=empty_moments)
def channel_stats(x: Tensor) -> Tensor:
    return _backend(x).channel_stats(x)


@_operation(
    "(Tensor x, Tensor packed, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps) "
    "-> (Tensor, Tensor)",
    fake=lambda x, *_: (empty_like_input(x), empty_statistics(x)),
)
def normalize(
    x: Tensor,
    packed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    tracked = (running_mean, running_var, num_batches_tracked)
    result = _backend(x).normalize(x, packed, weight, bias, *tracked, momentum, eps)
    # A kernel writes behind autograd's back; saved tensors must still notice.
    torch.autograd.graph.increment_version([t for t in tracked if t is not None])
    return result


@_operation(
    "(Tensor x, Tensor dy, Tensor stats, ScalarType? weight_dtype, ScalarType? bias_dtype) "
    "-> (Tensor, Tensor, Tensor)",
    fake=lambda x, dy, stats, *dtypes: empty_gradients(x, *dtypes),
)
def backward_reduce(
    x: Tensor,
    dy: Tensor,
    stats: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _backend(x).backward_reduce(x, dy, stats, weight_dtype, bias_dtype)


@_operation(
    "(Tensor x, Tensor dy, Tensor stats, Tensor? weight, Tensor packed) -> Tensor",
    fake=lambda x, *_: empty_like_input(x),
)
def backward_input(
    x: Tensor, dy: Tensor, stats: Tensor, weight: Tensor | None, packed: Tensor
) -> Tensor:
    return _backend(x).backward_input(x, dy, stats, weight, packed)
