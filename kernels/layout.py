"""Tensors as ``(N, C, S)`` with three strides, without a copy wherever strides allow it.

``N`` is the batch, ``C`` the channels, ``S`` the product of the spatial sizes (1 for 2-D input).
Where every tensor of a launch visits batch and space with a single stride (channels-last, 2-D, one
sample, one channel), the batch is folded into space: ``N = 1, S = N * spatial``. Tiles are then cut
from one long dimension, which is what keeps them full when the image is small.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Strides(NamedTuple):
    """Element strides of one tensor seen as ``(N, C, S)``."""

    n: int
    c: int
    s: int


class View(NamedTuple):
    """The sizes that the tensors of one launch share, and the strides of each.

    ``copied`` tells which of them cannot be seen so, and must be made contiguous first.
    """

    N: int
    C: int
    S: int
    strides: tuple[Strides, ...]
    copied: tuple[bool, ...]

    @property
    def channels_fastest(self) -> bool:
        """Whether neighbouring channels of the first tensor are neighbours in memory."""
        return self.strides[0].c == 1 and self.C > 1

    @property
    def dense(self) -> bool:
        """Whether every tensor's channels and positions are one run of memory."""
        if self.channels_fastest:
            return self.N == 1 and all(t.c == 1 and t.s == self.C for t in self.strides)
        return all(t.s == 1 and (t.c == self.S or self.C == 1) for t in self.strides)


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


def _folded(shape: Sequence[int], strides: Sequence[int]) -> Strides | None:
    s = _merged_stride((shape[0], *shape[2:]), (strides[0], *strides[2:]))
    return None if s is None else Strides(0, strides[1], s)


def _batched(shape: Sequence[int], strides: Sequence[int]) -> Strides | None:
    s = _merged_stride(shape[2:], strides[2:])
    return None if s is None else Strides(strides[0], strides[1], s)


def view(shape: Sequence[int], *strides: Sequence[int]) -> View:
    """Views tensors ``(N, C, *)`` of one shape, by their strides, over common ``(N, C, S)`` sizes.

    A tensor whose spatial dimensions have no common stride (a transposed or cropped image) has to
    be copied to contiguous memory; no other has.
    """
    n, c = shape[:2]
    s = math.prod(shape[2:])
    folded = tuple(t for each in strides if (t := _folded(shape, each)))
    if len(folded) == len(strides):
        return View(1, c, n * s, folded, (False,) * len(strides))
    batched = [_batched(shape, each) for each in strides]
    contiguous = Strides(c * s, s, 1)
    return View(n, c, s, tuple(t or contiguous for t in batched), tuple(not t for t in batched))
