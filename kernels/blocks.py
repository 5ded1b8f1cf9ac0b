"""Block sizes of a launch: which tile, how many programs, how many warps.

`choose_blocks` is the one place that decides. It takes blocks that were tuned for the shape, or one
near it, from a table (see `tables`), and else an analytic heuristic's: tiles whose rows are whole
cache lines where the shape allows it, with as little padding as possible, and enough programs for
every multiprocessor whatever C is.
"""

import math
import os
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from .entries import MAX_SPLIT, REDUCTIONS, key_of
from .layout import View
from .tables import device_name, lookup
from .tile import Tile

# Elements and warps of a tile: 16 elements a thread keep two accumulators and two to four
# independent 16-byte loads per input within 128 registers.
_TILE = 2048
_WARPS = 4
# A row of a tile is at most one 128-byte cache line of channels, and at least half a line.
_LINE = 128
# Bytes of the widest load.
_VECTOR = 16
# Programs per multiprocessor: 8 of 128 threads with two 16-byte loads each keep 32 KiB in flight,
# more than the 20 KiB that hide the latency of device memory.
_PROGRAMS_PER_SM = 8
# A split reduction pays for its merge once each program has this many tiles.
_TILES_PER_SPLIT = 2
# An elementwise program spreads its per-channel prologue over at most this many tiles.
_TILES_PER_PROGRAM = 8


class Blocks(NamedTuple):
    """A tile of BLOCK_C channels by BLOCK_S positions, programs per group of channels, and warps.

    Powers of two, except in a flat tile (see `tile`), which holds whole rows of contiguous input,
    ``BLOCK_S = S``, or whole positions of channels-last input, ``BLOCK_C = C``.
    """

    BLOCK_C: int
    BLOCK_S: int
    split: int = 1
    num_warps: int = 4
    flat: bool = False

    def cut(self, v: View) -> "Cut":
        """How these blocks cut a view into tiles and programs."""
        row, tile_s, inner = v.S, self.BLOCK_S, 0
        ends, steps = [row], [t.s * tile_s for t in v.strides]
        block_c, block_s = self.BLOCK_C, self.BLOCK_S
        if self.flat:
            tile_s = self.BLOCK_C * self.BLOCK_S
            ends, steps = [v.C * v.S], [tile_s]
            block_c, block_s = 1, triton.next_power_of_2(tile_s)
            if v.channels_fastest:
                row, inner = v.S * v.C, 1
            else:
                row, inner = tile_s, v.S
        tiles_per_row = triton.cdiv(row, tile_s)
        tiles = v.N * tiles_per_row
        tiles_per_program = max(1, triton.cdiv(tiles, self.split))
        split = max(1, triton.cdiv(tiles, tiles_per_program))
        # In one row, only the last tile can be ragged.
        full_tiles = row // tile_s if v.N == 1 else 0 if row % tile_s else tiles
        tile = Tile(
            BLOCK_C=block_c,
            BLOCK_S=block_s,
            CHANNELS=self.BLOCK_C,
            INNER=inner,
            TILE_S=tile_s,
            START=math.gcd(16, *steps, *(t.n for t in v.strides)),
            ALIGN_C=math.gcd(16, *(t.c for t in v.strides)),
            ALIGN_S=math.gcd(16, *(t.s for t in v.strides)),
            VECTOR=math.gcd(16, tile_s, *ends),
            EVEN_C=v.C % self.BLOCK_C == 0,
            EVEN_S=row % tile_s == 0,
        )
        grid = triton.cdiv(v.C, self.BLOCK_C) * split
        sizes = (v.C, row, tiles, tiles_per_row, tiles_per_program, full_tiles)
        return Cut(grid, sizes, split, tile, self.num_warps)


class Cut(NamedTuple):
    """A view cut into tiles.

    ``sizes`` is ``(C, S, tiles, tiles_per_row, tiles_per_program, full_tiles)`` as the kernels take
    them: S is the length of a row of tiles, and ``full_tiles`` how many come before one is ragged.
    """

    grid: int
    sizes: tuple[int, int, int, int, int, int]
    split: int
    tile: Tile
    num_warps: int


def choose_blocks(kernel: str, v: View, dtype: torch.dtype, device: torch.device) -> Blocks:
    """Block sizes for a kernel, by name, over a view of tensors of this dtype on this device.

    With ``SYNCBN_TRITON_AUTOTUNE=1``, a shape that no table has is tuned first.
    """
    name = device_name(device)
    if name and v.N * v.C * v.S > 0:
        if os.environ.get("SYNCBN_TRITON_AUTOTUNE") == "1":
            from .tuning import tune_unseen  # launches kernels, which choose blocks here

            tune_unseen(kernel, v, dtype, device)
        if entry := lookup(name, key_of(kernel, v, dtype)):
            return Blocks(*entry.blocks)
    return heuristic(kernel, v, dtype, device)


def heuristic(kernel: str, v: View, dtype: torch.dtype, device: torch.device) -> Blocks:
    """What an analysis chooses, without a measurement."""
    sms = multiprocessors(device)
    layout = (v.channels_fastest, v.dense)
    return _heuristic(kernel, layout, dtype.itemsize, v.N, v.C, v.S, sms)


@lru_cache(maxsize=4096)
def _heuristic(
    kernel: str, layout: tuple[bool, bool], itemsize: int, N: int, C: int, S: int, sms: int
) -> Blocks:
    channels_fastest, dense = layout
    tile = _TILE // 2 if itemsize == 8 else _TILE
    line = _LINE // itemsize
    fastest = C if channels_fastest else S
    flat = None
    if dense and fastest % (line // 2):
        flat = flat_tile(channels_fastest, C, S, tile, _VECTOR // itemsize)
    if not flat:
        # Where rows start anywhere, each element is a load of its own, with a pointer of its own.
        tile //= {1: 4, 2: 2}.get(math.gcd(fastest, _VECTOR // itemsize), 1)
    if flat:
        block_c, block_s = flat
    elif channels_fastest:
        block_c = _least_padding(C, line // 2, line)
        block_s = min(triton.next_power_of_2(max(1, S)), tile // block_c)
    else:
        block_s = _least_padding(S, line // 2, tile)
        block_c = _least_padding(C, max(1, tile // 4 // block_s), tile // block_s)
    # Summing a flat tile by channel takes as many registers again.
    per_warp = tile // _WARPS // (2 if flat else 1)
    num_warps = min(_WARPS, max(1, triton.next_power_of_2(block_c * block_s) // per_warp))

    groups = triton.cdiv(C, block_c)
    tiles = N * triton.cdiv(S, block_s)
    filling = triton.cdiv(_PROGRAMS_PER_SM * sms, groups)
    if kernel in REDUCTIONS:
        split = min(filling, tiles // _TILES_PER_SPLIT, MAX_SPLIT)
    else:
        split = min(tiles, max(filling, triton.cdiv(tiles, _TILES_PER_PROGRAM)))
    return Blocks(block_c, block_s, max(1, split), num_warps, flat is not None)


def flat_tile(
    channels_fastest: bool, C: int, S: int, tile: int, vector: int
) -> tuple[int, int] | None:
    """The largest flat tile of multiples of a vector load that idles few lanes, if any."""
    whole, count = (C, S) if channels_fastest else (S, C)
    step = vector // math.gcd(whole, vector)

    def lanes(n: int) -> int:
        return triton.cdiv(count, n) * triton.next_power_of_2(n * whole)

    most = min(tile // whole, count) // step * step
    choices = [n for n in range(most, 0, -step) if 8 * n * whole >= tile or n == most]
    if not choices:
        return None
    fewest = min(map(lanes, choices))
    n = next(n for n in choices if lanes(n) <= 1.03 * fewest)
    return (C, n) if channels_fastest else (n, S)


def _least_padding(size: int, smallest: int, largest: int) -> int:
    """The power of two in [smallest, largest] that pads size least, the larger of equals.

    A size below the smallest gets the power of two that holds it.
    """
    enough = triton.next_power_of_2(max(1, size))
    if enough <= smallest:
        return enough
    last = min(largest, enough)
    blocks = [last >> e for e in range((last // smallest).bit_length())]
    return min(blocks, key=lambda block: triton.cdiv(size, block) * block)


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; 1 under the interpreter, which runs one program at a time."""
    if triton.knobs.runtime.interpret:
        return 1
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return properties["multiprocessor_count"]
