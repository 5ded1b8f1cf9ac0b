"""How a launch is cut into tiles, and how a program addresses them.

A tile is ``[BLOCK_C, BLOCK_S]``. The ``N * cdiv(S, BLOCK_S)`` tiles of a group of ``BLOCK_C``
channels are numbered with space fastest and dealt out in runs of ``tiles_per_program``; the grid is
one-dimensional, channel groups fastest. Tile positions are 64-bit: a view may reach past 2^31.
"""

import triton
import triton.language as tl


@triton.jit
def program_channels(pid, C, BLOCK_C: tl.constexpr, EVEN_C: tl.constexpr):
    """Channels of a program, and which of them exist."""
    offs_c = (pid % tl.cdiv(C, BLOCK_C)) * BLOCK_C + tl.arange(0, BLOCK_C)
    # A constant mask folds away: full tiles are loaded without one.
    mask_c = tl.full([BLOCK_C], 1, tl.int1) if EVEN_C else offs_c < C
    return offs_c, mask_c


@triton.jit
def program_tiles(pid, C, tiles, tiles_per_program, BLOCK_C: tl.constexpr):
    """First tile of a program, and one past its last."""
    begin = (pid // tl.cdiv(C, BLOCK_C)) * tiles_per_program
    return begin, tl.minimum(begin + tiles_per_program, tiles)


@triton.jit
def tile_pointers(ptr, offs_c, stride_c, stride_s, BLOCK_S: tl.constexpr):
    """Pointers of the tile at (n, s) = (0, 0); `tile_start` moves them to any other."""
    offs_s = tl.arange(0, BLOCK_S)
    return ptr + (offs_c.to(tl.int64)[:, None] * stride_c + offs_s.to(tl.int64)[None, :] * stride_s)


@triton.jit
def tile_start(t, tiles_per_row, stride_n, stride_s, BLOCK_S: tl.constexpr):
    """Offset in elements of tile t."""
    n = t // tiles_per_row
    s = tl.cast(t - n * tiles_per_row, tl.int64) * BLOCK_S
    return tl.cast(n, tl.int64) * stride_n + s * stride_s


@triton.jit
def tile_mask(t, mask_c, S, tiles_per_row, BLOCK_S: tl.constexpr, EVEN_S: tl.constexpr):
    """Which elements of tile t exist."""
    if EVEN_S:
        mask_s = tl.full([BLOCK_S], 1, tl.int1)
    else:
        left = S - tl.cast(t % tiles_per_row, tl.int64) * BLOCK_S
        mask_s = tl.arange(0, BLOCK_S) < tl.minimum(left, BLOCK_S).to(tl.int32)
    return mask_c[:, None] & mask_s[None, :]


@triton.jit
def elements_in(begin, end, S, tiles_per_row, BLOCK_S: tl.constexpr):
    """Elements per channel in tiles [begin, end): all, less what each row's last one lacks."""
    rows_ended = end // tiles_per_row - begin // tiles_per_row
    lacking = tiles_per_row * BLOCK_S - S
    return tl.cast(end - begin, tl.int64) * BLOCK_S - tl.cast(rows_ended, tl.int64) * lacking
