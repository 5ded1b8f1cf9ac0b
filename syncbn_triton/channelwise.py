"""Sums and maps per channel of CPU tensors, from the operators of torch that are fast at each.

A tensor is cut into blocks: images ``(n, C, S)`` where it is contiguous, and rows of channels,
``(rows, k * C)``, where channels are innermost in memory. Over images, torch's broadcast arithmetic
is up to 15 times slower than the parts of ``native_batch_norm``. Over rows it is the faster, but
``native_batch_norm`` adds them up in one fp32 loop, whose error grows with their number: ``k`` rows
are taken for one of ``k * C`` channels, and the ``k`` results of each channel added in fp64.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .kernels.results import memory_format

# Elements of a block that temporaries are made of: 2 MiB of fp32.
_TEMPORARY = 1 << 19
# Elements of a block of rows that are added up: 4096 rows of the channels that they are folded
# into, of which more would leave the first-level cache.
_SUMMED = 1 << 22
# Channels to fold rows into, for sums to be exact, and for maps to have long rows.
SUMS, MAPS = 1 << 10, 1 << 6
_LEAST_ROWS = 16


def blocks(x: Tensor, *others: Tensor | None, channels: int, whole: bool) -> Iterable[Any]:
    """Blocks of tensors of x's shape, as x lies; one that lies otherwise is copied.

    Of an absent tensor, each block is None. Rows are folded into ``channels``, SUMS or MAPS. Where
    nothing the size of a block is made of it, blocks may be ``whole`` tensors.
    """
    as_rows = x.dim() == 2 or memory_format(x) != torch.contiguous_format
    if as_rows:
        k = _fold(x.numel() // x.shape[1], x.shape[1], channels)
        cut = partial(_rows, k, whole)
    else:
        cut = partial(_images, whole)
    return zip(*(repeat(None) if t is None else cut(t) for t in (x, *others)), strict=False)


def _images(whole: bool, t: Tensor) -> Sequence[Tensor]:
    if whole:
        return [t.contiguous()]
    N, C = t.shape[:2]
    return t.contiguous().view(N, C, -1).split(max(1, _TEMPORARY * N // t.numel()))


def _rows(k: int, whole: bool, t: Tensor) -> Sequence[Tensor]:
    C = t.shape[1]
    rows = t.numel() // C
    if t.dim() > 2:
        t = t.permute(0, *range(2, t.dim()), 1)
    most = max(1, (_SUMMED if whole else _TEMPORARY) // (k * C))
    if rows % k == 0:
        folded = t.reshape(rows // k, k * C).contiguous()
        return [folded] if len(folded) <= most else folded.split(most)
    flat = t.reshape(rows, C).contiguous()
    end = rows // k * k
    return [*flat[:end].view(-1, k * C).split(most), flat[end:]]


@lru_cache(maxsize=1024)
def _fold(rows: int, C: int, channels: int) -> int:
    """How many rows to take for one, if possible without a remainder."""
    most = max(1, min(channels // C, rows // _LEAST_ROWS))
    return next((k for k in range(most, most // 2, -1) if rows % k == 0), most)


def _folded(c: Tensor, block: Tensor) -> Tensor:
    """A value per channel, for each of the channels that a block is folded into."""
    k = block.shape[1] // len(c)
    return c if k == 1 else c.repeat(k)


def _native(block: Tensor) -> Tensor:
    """A block as torch's batch norm takes it; rows as images of one column, channels last."""
    if block.dim() > 2:
        return block
    return block.view(1, len(block), 1, -1).permute(0, 3, 1, 2)


def mean_and_var(block: Tensor) -> tuple[Tensor, Tensor]:
    """``(k * C,)``: means and biased variances of a block."""
    return torch.batch_norm_update_stats(_native(block), None, None, 0.0)


def sums_of_products(x: Tensor, dy: Tensor, mean: Tensor) -> Tensor:
    """``(2C,)``, fp64: sums of dy and of ``dy * (x - mean)`` over a block; mean per channel."""
    C = len(mean)
    mean = _folded(mean, x)
    one = torch.ones_like(mean)
    _, of_dy_xmu, of_dy = torch.ops.aten.native_batch_norm_backward(
        _native(dy), _native(x), one, None, None, mean, one, True, 0.0, (False, True, True)
    )
    sums = torch.cat([of_dy, of_dy_xmu]).double()
    return sums if len(mean) == C else sums.view(2, -1, C).sum(1).view(-1)


def affine(x: Tensor, mean: Tensor, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``x * a + (b - mean * a)`` of a block; mean, a and b per channel."""
    if x.dim() == 2:
        b = torch.addcmul(b, mean, a, value=-1)
        return torch.addcmul(_folded(b, x), x, _folded(a, x), out=out)
    options = (x, a, b, mean, torch.ones_like(mean), False, 0.0, 0.0)
    if out is None:
        return torch.native_batch_norm(*options)[0]
    unused = mean.new_empty(0)
    return torch.native_batch_norm(*options, out=(out, unused, unused))[0]


def minus(x: Tensor, c: Tensor) -> Tensor:
    """``x - c`` of a block, c per channel: exact for x near c."""
    if x.dim() == 2:
        return x - _folded(c, x)
    return affine(x, c, torch.ones_like(c), torch.zeros_like(c))


def add_product(z: Tensor, x: Tensor, a: Tensor) -> Tensor:
    """``z + x * a`` of blocks, in z; a per channel."""
    return z.addcmul_(x, _folded(a, x) if x.dim() == 2 else a.view(-1, *[1] * (x.dim() - 2)))
