"""Tensors as ``(N, C, S)`` with three strides, without a copy wherever strides allow it.

``N`` is the batch, ``C`` the channels, ``S`` the product of the spatial sizes (1 for 2-D input).
Where every tensor of a launch visits batch and space with a single stride (channels-last, 2-D, one
sample, one channel), the batch is folded into space: ``N = 1, S = N * spatial``. Tiles are then cut
from one long dimension, which is what keeps them full when the image is small.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Strides(NamedTuple):
    """Element strides of one tensor seen as ``(N, C, S)``."""

    n: int
    c: int
    s: int


class View(NamedTuple):
    """The sizes that the tensors of one launch share, and each tensor with its strides."""

    N: int
    C: int
    S: int
    tensors: tuple[Tensor, ...]
    strides: tuple[Strides, ...]

    @property
    def channels_fastest(self) -> bool:
        """Whether neighbouring channels of the first tensor are neighbours in memory."""
        return self.strides[0].c == 1 and self.C > 1

    @property
    def dense(self) -> bool:
        """Whether every tensor's channels and positions are one run of memory."""
        if self.channels_fastest:
            return self.N == 1 and all(t.c == 1 and t.s == self.C for t in self.strides)
        return all(t.s == 1 and t.c == self.S for t in self.strides)


def _merged_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The one stride that visits these dimensions in order, or None; 0 where nothing moves."""
    merged, extent = 0, 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if extent == 1:
            merged = stride
        elif stride != merged * extent:
            return None
        extent *= size
    return merged


def _folded(x: Tensor) -> Strides | None:
    sizes, strides = x.shape, x.stride()
    s = _merged_stride((sizes[0], *sizes[2:]), (strides[0], *strides[2:]))
    return None if s is None else Strides(0, strides[1], s)


def _batched(x: Tensor) -> Strides | None:
    s = _merged_stride(x.shape[2:], x.stride()[2:])
    return None if s is None else Strides(x.stride(0), x.stride(1), s)


def view(*tensors: Tensor) -> View:
    """Views tensors of one shape ``(N, C, *)`` over common ``(N, C, S)`` sizes.

    A tensor whose spatial dimensions have no common stride (a transposed or cropped image) is
    copied to contiguous memory; no other is.
    """
    n, c = tensors[0].shape[:2]
    s = tensors[0].shape[2:].numel()
    folded = tuple(strides for x in tensors if (strides := _folded(x)))
    if len(folded) == len(tensors):
        return View(1, c, n * s, tensors, folded)
    tensors = tuple(x if _batched(x) else x.contiguous() for x in tensors)
    return View(n, c, s, tensors, tuple(strides for x in tensors if (strides := _batched(x))))
