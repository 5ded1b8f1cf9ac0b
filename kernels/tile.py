"""How a launch is cut into tiles, and how a program addresses them.

A tile is ``[BLOCK_C, BLOCK_S]`` elements of memory, and a vector of channels beside it.

* Grid tiles: ``BLOCK_C`` channels by ``BLOCK_S`` positions, by any strides.
* Flat tiles, where rows are no multiple of a 16-byte load (7 x 7 images, 24 channels last):
  ``TILE_S`` neighbours in memory as ``[1, BLOCK_S]``, the rest masked. They hold whole channels
  (contiguous: ``CHANNELS`` rows of ``INNER = S``) or whole positions (channels-last: ``INNER = 1``,
  all channels), so that a lane has channel ``lane // INNER % CHANNELS`` in every tile.

The tiles of a group of channels are numbered with space fastest and dealt out in runs of
``tiles_per_program``; the grid is one-dimensional, groups fastest. Positions are 64-bit: a view may
reach past 2^31.
"""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Tile:
    """What a kernel is compiled for. INNER is 0 in a grid tile, where TILE_S is BLOCK_S.

    EVEN_C and EVEN_S tell that channels and rows are whole numbers of tiles. What divides offsets
    is what loads can be as wide as, and Triton itself knows of multiples of 16 alone: START divides
    the starts of all tiles, ALIGN_C and ALIGN_S what is between channels and between positions, and
    VECTOR the ends of rows and flat tiles.
    """

    BLOCK_C: int
    BLOCK_S: int
    CHANNELS: int
    INNER: int
    TILE_S: int
    START: int
    ALIGN_C: int
    ALIGN_S: int
    VECTOR: int
    EVEN_C: bool
    EVEN_S: bool


@triton.jit
def zeros(DTYPE: tl.constexpr, TILE: tl.constexpr):
    """A tile of zeros; Triton 3.6 takes no attribute of a constant in a shape."""
    BLOCK_C: tl.constexpr = TILE.BLOCK_C
    BLOCK_S: tl.constexpr = TILE.BLOCK_S
    return tl.zeros([BLOCK_C, BLOCK_S], DTYPE)


@triton.jit
def tiles_of_program(pid, C, tiles, tiles_per_program, TILE: tl.constexpr):
    """The group of channels of a program, its first tile, and one past its last."""
    groups = tl.cdiv(C, TILE.CHANNELS)
    begin = (pid // groups) * tiles_per_program
    return pid % groups, begin, tl.minimum(begin + tiles_per_program, tiles)


@triton.jit
def tiles_of_kind(begin, end, full_tiles, RAGGED: tl.constexpr):
    """The part of tiles [begin, end) that is whole, or the part whose rows may end within."""
    if RAGGED:
        return tl.maximum(begin, full_tiles), end
    else:
        return begin, tl.minimum(end, full_tiles)


@triton.jit
def channels_of_group(group, C, TILE: tl.constexpr):
    """Channels of a group, padded to a power of two, and which of them exist."""
    PADDED: tl.constexpr = triton.next_power_of_2(TILE.CHANNELS)
    offs = tl.arange(0, PADDED)
    offs_c = group * TILE.CHANNELS + offs
    # Constant masks fold away: full tiles are loaded without one.
    mask_c = tl.full([PADDED], 1, tl.int1)
    if PADDED != TILE.CHANNELS:
        mask_c &= offs < TILE.CHANNELS
    if not TILE.EVEN_C:
        mask_c &= offs_c < C
    return offs_c, mask_c


@triton.jit
def tile_pointers(ptr, group, stride_c, stride_s, TILE: tl.constexpr):
    """Pointers of the tile at (n, s) = (0, 0); `tile_start` moves them to any other."""
    offs_s = tl.arange(0, TILE.BLOCK_S).to(tl.int64)
    if TILE.INNER:
        return ptr + (tl.cast(group, tl.int64) * TILE.TILE_S + offs_s)[None, :]
    else:
        ALIGN_C: tl.constexpr = TILE.ALIGN_C
        ALIGN_S: tl.constexpr = TILE.ALIGN_S
        offs_c = (group * TILE.BLOCK_C + tl.arange(0, TILE.BLOCK_C)).to(tl.int64)
        rows = tl.multiple_of(offs_c * stride_c, ALIGN_C)
        columns = tl.multiple_of(offs_s * stride_s, ALIGN_S)
        return ptr + (rows[:, None] + columns[None, :])


@triton.jit
def tile_start(t, tiles_per_row, stride_n, stride_s, TILE: tl.constexpr):
    """Offset in elements of tile t."""
    n = tl.cast(t // tiles_per_row, tl.int64)
    s = tl.cast(t % tiles_per_row, tl.int64) * TILE.TILE_S
    START: tl.constexpr = TILE.START
    if TILE.INNER:
        return tl.multiple_of(n * stride_n + s, START)
    else:
        return tl.multiple_of(n * stride_n + s * stride_s, START)


@triton.jit
def tile_mask(t, group, C, S, tiles_per_row, RAGGED: tl.constexpr, TILE: tl.constexpr):
    """Which elements of tile t exist; rows end within it only if RAGGED."""
    VECTOR: tl.constexpr = TILE.VECTOR
    BLOCK_C: tl.constexpr = TILE.BLOCK_C
    BLOCK_S: tl.constexpr = TILE.BLOCK_S
    offs_s = tl.arange(0, BLOCK_S)
    mask = tl.full([BLOCK_C, BLOCK_S], 1, tl.int1)
    if TILE.TILE_S != TILE.BLOCK_S:
        mask &= (offs_s < TILE.TILE_S)[None, :]
    if RAGGED:
        left = S - tl.cast(t % tiles_per_row, tl.int64) * TILE.TILE_S
        left = tl.minimum(left, TILE.TILE_S).to(tl.int32)
        mask &= (offs_s < tl.multiple_of(left, VECTOR))[None, :]
    if not TILE.EVEN_C:
        left_c = C - group * TILE.CHANNELS
        if TILE.INNER:
            mask &= (offs_s < tl.multiple_of(left_c * TILE.INNER, VECTOR))[None, :]
        else:
            mask &= (tl.arange(0, BLOCK_C) < left_c)[:, None]
    return mask


@triton.jit
def elements_in(begin, end, S, tiles_per_row, TILE: tl.constexpr):
    """Elements per channel in tiles [begin, end): all, less what each row's last one lacks."""
    rows_ended = end // tiles_per_row - begin // tiles_per_row
    lacking = tiles_per_row * TILE.TILE_S - S
    elements = tl.cast(end - begin, tl.int64) * TILE.TILE_S
    elements -= tl.cast(rows_ended, tl.int64) * lacking
    return elements // TILE.CHANNELS if TILE.INNER else elements


@triton.jit
def spread(v, TILE: tl.constexpr):
    """A vector over channels, to be broadcast against a tile."""
    if TILE.INNER:
        lane = tl.arange(0, TILE.BLOCK_S)
        return tl.gather(v, (lane // TILE.INNER) % TILE.CHANNELS, 0)[None, :]
    else:
        return v[:, None]


@triton.jit
def sum_channels(x, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """Sum of a tile over each channel, added up in DTYPE; absent elements must be 0."""
    if TILE.INNER:
        # The lanes of each channel are gathered into a row of their own.
        PADDED: tl.constexpr = triton.next_power_of_2(TILE.CHANNELS)
        BLOCK_S: tl.constexpr = TILE.BLOCK_S
        LENGTH: tl.constexpr = TILE.TILE_S // TILE.CHANNELS
        COLUMNS: tl.constexpr = triton.next_power_of_2(LENGTH)
        i = tl.arange(0, PADDED * COLUMNS)
        channel, j = i // COLUMNS, i % COLUMNS
        run = TILE.CHANNELS * TILE.INNER
        lane = (j // TILE.INNER) * run + channel * TILE.INNER + j % TILE.INNER
        exists = (channel < TILE.CHANNELS) & (j < LENGTH)
        rows = tl.gather(tl.reshape(x, [BLOCK_S]), tl.where(exists, lane, 0), 0)
        rows = tl.where(exists, rows, 0.0)
        return tl.sum(tl.reshape(rows, [PADDED, COLUMNS]).to(DTYPE), axis=1)
    else:
        return tl.sum(x.to(DTYPE), axis=1)
