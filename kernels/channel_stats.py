"""Moments of each channel, from one read of x.

A program takes the mean of its first tile as a pilot ``k``, accumulates per lane ``sum d`` and
``sum d^2`` with ``d = x - k`` in fp32 (fp64 for fp64 input), and ends in fp64 with::

    mean = k + sum d / n        M2 = sum d^2 - (sum d)^2 / n

Sums of raw x and x^2 would lose the variance once ``mean^2 >> var``. A mean of real data cannot be
far from the mean of all: ``(k - mean)^2 <= var * n / n_first``, so the last subtraction costs at
most the number of tiles, for any data. (A single element as the pilot has no such bound.)

Shifted data: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983, section 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import Blocks, choose_blocks
from .layout import view
from .merge import merge_moments
from .packing import store_moments
from .plan import Plan, planned
from .results import empty_moments
from .tile import (
    channels_of_group,
    elements_in,
    spread,
    sum_channels,
    tile_mask,
    tile_pointers,
    tile_start,
    tiles_of_kind,
    tiles_of_program,
)


@triton.jit
def channel_stats_kernel(
    x_ptr,
    out_ptr,
    C,
    S,
    tiles,
    tiles_per_row,
    tiles_per_program,
    full_tiles,
    stride_xn,
    stride_xc,
    stride_xs,
    ACC: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    group, begin, end = tiles_of_program(pid, C, tiles, tiles_per_program, TILE)
    offs_c, mask_c = channels_of_group(group, C, TILE)
    x_ptrs = tile_pointers(x_ptr, group, stride_xc, stride_xs, TILE)

    start = tile_start(begin, tiles_per_row, stride_xn, stride_xs, TILE)
    mask = tile_mask(begin, group, C, S, tiles_per_row, not TILE.EVEN_S, TILE)
    x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(ACC)
    in_first = elements_in(begin, begin + 1, S, tiles_per_row, TILE)
    pilot = sum_channels(x, ACC, TILE) / tl.cast(in_first, ACC)
    k = spread(pilot, TILE)

    d = tl.where(mask, x - k, 0.0)
    sum_d = d
    sum_dd = d * d
    for RAGGED in tl.static_range(0, 1 if TILE.EVEN_S else 2):
        first, last = tiles_of_kind(begin + 1, end, full_tiles, RAGGED)
        for t in range(first, last):
            start = tile_start(t, tiles_per_row, stride_xn, stride_xs, TILE)
            mask = tile_mask(t, group, C, S, tiles_per_row, RAGGED, TILE)
            x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(ACC)
            d = tl.where(mask, x - k, 0.0)
            sum_d += d
            sum_dd += d * d

    n = tl.cast(elements_in(begin, end, S, tiles_per_row, TILE), tl.float64)
    d1 = sum_channels(sum_d, tl.float64, TILE)
    d2 = sum_channels(sum_dd, tl.float64, TILE)
    mean = pilot.to(tl.float64) + d1 / n
    m2 = d2 - d1 * d1 / n
    if SPLIT:
        row_ptr = out_ptr + tl.cast(begin // tiles_per_program, tl.int64) * (2 * C + 1)
        tl.store(row_ptr + offs_c, mean, mask=mask_c)
        tl.store(row_ptr + C + offs_c, m2, mask=mask_c)
        tl.store(row_ptr + 2 * C + offs_c, n, mask=mask_c & (offs_c == 0))
    else:
        store_moments(out_ptr, offs_c, mask_c, C, mean, m2, n)


@planned
def _plans(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    blocks: Blocks | None,
) -> tuple[int, Plan, Plan]:
    """Rows of partial results, the plan that computes them, and the one that merges them."""
    v = view(shape, strides)
    cut = (blocks or choose_blocks("channel_stats", v, dtype, device)).cut(v)
    reduce = Plan.over(channel_stats_kernel, v, cut, dtype, device, SPLIT=cut.split > 1)
    return cut.split, reduce, merge_moments(cut.split, v.C, device)


def channel_stats(x: Tensor, blocks: Blocks | None = None) -> Tensor:
    """Packs count, mean and sum of squares of each channel (see `packing`).

    Args:
        x: ``(N, C, *)``, floating point, any strides; N may be 0.
        blocks: Block sizes; chosen for the shape if absent.

    Returns:
        ``(2C + 1,)``, fp64; zeros if x is empty.
    """
    packed = empty_moments(x)
    if x.numel() == 0:
        return packed.zero_()
    rows, reduce, merge = _plans(x.shape, x.stride(), x.dtype, x.device, blocks)
    if rows == 1:
        reduce.launch(x, packed)
        return packed
    partials = packed.new_empty(rows, packed.numel())
    reduce.launch(x, partials)
    merge.launch(partials, packed)
    return packed
