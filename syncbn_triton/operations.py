"""The four operations of the layer, registered with torch.

===============  ===============================================================================
channel_stats    x -> moments of this rank, packed, ``(2C + 1,)`` fp64
normalize        x, moments of all ranks -> y, and the statistics ``(3C + 1,)`` for backward;
                 updates the running statistics in place, and writes the epilogue's mask
backward_reduce  x, dy, statistics -> sums of this rank, packed, ``(2C,)`` fp64, and the gradients
                 of weight and bias, ``(C,)``, and dz, each ``(0,)`` where not wanted
backward_input   x, dy, statistics, sums of all ranks -> dx
===============  ===============================================================================

An all-reduce of the packed tensor goes between the two of each direction. Registration makes an
operation opaque to ``torch.compile``, which sees its schema and the shapes its fake gives. The
packed tensors are described in ``syncbn_triton.kernels.packing``, activation, residual and mask in
``syncbn_triton.kernels.epilogue``.
"""

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from . import aten
from .backend import backend_for
from .kernels.epilogue import Epilogue
from .kernels.results import (
    empty_gradients,
    empty_like_input,
    empty_moments,
    empty_statistics,
)

Operation = TypeVar("Operation", bound=Callable[..., object])

# An Epilogue in a schema. Forward writes the mask that backward reads.
_FORWARD_EPILOGUE = (
    "str? activation=None, float negative_slope=0.01, Tensor? residual=None, Tensor(d!)? mask=None"
)
_BACKWARD_EPILOGUE = _FORWARD_EPILOGUE.replace("(d!)", "")

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


def _recomputing() -> bool:
    """Whether activation checkpointing runs this forward, inside a backward, a second time.

    The first time has updated the running statistics already. Asked here, where a compiled graph
    asks too: the graph is the same both times.
    """
    return torch._C._current_graph_task_id() != -1


@_operation("(Tensor x) -> Tensor", fake=empty_moments)
def channel_stats(x: Tensor) -> Tensor:
    return _backend(x).channel_stats(x)


@_operation(
    "(Tensor x, Tensor packed, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps, "
    f"{_FORWARD_EPILOGUE}) -> (Tensor, Tensor)",
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
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tracked = (running_mean, running_var, num_batches_tracked)
    if _recomputing():
        tracked = (None, None, None)
    epilogue = Epilogue(activation, negative_slope, residual, mask)
    result = _backend(x).normalize(
        x, packed, weight, bias, *tracked, momentum, eps, epilogue=epilogue
    )
    # A kernel writes behind autograd's back; saved tensors must still notice.
    torch.autograd.graph.increment_version([t for t in tracked if t is not None])
    return result


def _empty_dz(x: Tensor, wanted: bool) -> Tensor:
    return empty_like_input(x) if wanted else x.new_empty(0)


def _empty_of_backward_reduce(
    x: Tensor,
    dy: Tensor,
    stats: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    *affine_and_epilogue: object,
    wants_dz: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *empty_gradients(x, weight_dtype, bias_dtype), _empty_dz(x, wants_dz)


@_operation(
    "(Tensor x, Tensor dy, Tensor stats, ScalarType? weight_dtype, ScalarType? bias_dtype, "
    f"Tensor? weight=None, Tensor? bias=None, {_BACKWARD_EPILOGUE}, *, bool wants_dz=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    fake=_empty_of_backward_reduce,
)
def backward_reduce(
    x: Tensor,
    dy: Tensor,
    stats: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
    wants_dz: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dz = _empty_dz(x, wants_dz)
    results = _backend(x).backward_reduce(
        x,
        dy,
        stats,
        weight_dtype,
        bias_dtype,
        weight=weight,
        bias=bias,
        epilogue=Epilogue(activation, negative_slope, residual, mask),
        dz=dz if wants_dz else None,
    )
    return *results, dz


@_operation(
    "(Tensor x, Tensor dy, Tensor stats, Tensor? weight, Tensor packed, Tensor? bias=None, "
    f"{_BACKWARD_EPILOGUE}) -> Tensor",
    fake=lambda x, *_: empty_like_input(x),
)
def backward_input(
    x: Tensor,
    dy: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    packed: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
    residual: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    epilogue = Epilogue(activation, negative_slope, residual, mask)
    return _backend(x).backward_input(x, dy, stats, weight, packed, bias=bias, epilogue=epilogue)
