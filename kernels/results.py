"""Shape, dtype and memory format of every result, uninitialised.

The launchers, the ATen implementation and the fakes that ``torch.compile`` sees all allocate here.
"""

import torch
from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format(x: Tensor) -> torch.memory_format:
    """The format of a result computed from x: channels-last where x is, contiguous otherwise.

    A part of a channels-last tensor counts as one, as in torch: what decides is the order of
    strides, channels innermost and the batch outermost.
    """
    if x.dim() in _CHANNELS_LAST and not x.is_contiguous():
        n, c, *space = x.stride()
        if 0 < c and all(a >= b for a, b in zip([n, *space], [*space, c], strict=True)):
            return _CHANNELS_LAST[x.dim()]
    return torch.contiguous_format


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """What x is computed in, and its statistics are saved in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def empty_like_input(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Result y or dx: shape, format and, unless another is given, dtype of x."""
    return torch.empty_like(x, dtype=dtype, memory_format=memory_format(x))


def empty_moments(x: Tensor) -> Tensor:
    """``(2C + 1,)``, fp64."""
    return x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64)


def empty_statistics(x: Tensor) -> Tensor:
    """``(3C + 1,)``, fp32, or fp64 for fp64 input."""
    return x.new_empty(3 * x.shape[1] + 1, dtype=accumulator_dtype(x))


def empty_gradients(
    x: Tensor, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(2C,)``, fp64; ``(C,)`` for weight and for bias, ``(0,)`` where there is none."""
    C = x.shape[1]
    return (
        x.new_empty(2 * C, dtype=torch.float64),
        x.new_empty(C if weight_dtype else 0, dtype=weight_dtype),
        x.new_empty(C if bias_dtype else 0, dtype=bias_dtype),
    )
