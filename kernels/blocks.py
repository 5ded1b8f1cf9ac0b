"""Block sizes of a launch: which tile, how many programs, how many warps.

`choose_blocks` is the one place that decides. It is an analytic heuristic: tiles whose rows are
whole cache lines where the shape allows it, with as little padding as possible, and enough programs
for every multiprocessor whatever C is.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from .layout import View

# Elements of a tile, at 4 warps: 16 a thread keep two accumulators and two to four independent
# 16-byte loads per input within 128 registers.
_TILE = 2048
_REDUCTIONS = ("channel_stats", "backward_reduce")
# A row of a tile is at most one 128-byte cache line of channels, and at least half a line.
_LINE = 128
# Programs per multiprocessor: 8 of 128 threads with two 16-byte loads each keep 32 KiB in flight,
# more than the 20 KiB that hide the latency of device memory.
_PROGRAMS_PER_SM = 8
# A split reduction pays for its merge once each program has this many tiles.
_TILES_PER_SPLIT = 4
# An elementwise program spreads its per-channel prologue over at most this many tiles.
_TILES_PER_PROGRAM = 8
_MAX_SPLIT = 1024


class Blocks(NamedTuple):
    """Tile sizes (powers of two), programs per group of BLOCK_C channels, and warps."""

    BLOCK_C: int
    BLOCK_S: int
    split: int = 1
    num_warps: int = 4

    def cut(self, v: View) -> "Cut":
        """How these blocks cut a view into tiles and programs."""
        tiles_per_row = triton.cdiv(v.S, self.BLOCK_S)
        tiles = v.N * tiles_per_row
        tiles_per_program = max(1, triton.cdiv(tiles, self.split))
        split = max(1, triton.cdiv(tiles, tiles_per_program))
        grid = triton.cdiv(v.C, self.BLOCK_C) * split
        even = {"EVEN_C": v.C % self.BLOCK_C == 0, "EVEN_S": v.S % self.BLOCK_S == 0}
        constants = {"BLOCK_C": self.BLOCK_C, "BLOCK_S": self.BLOCK_S, **even}
        tiling = (tiles, tiles_per_row, tiles_per_program)
        return Cut(grid, tiling, split, constants, self.num_warps)


class Cut(NamedTuple):
    """A view cut into tiles: the grid, ``(tiles, tiles_per_row, tiles_per_program)``, constants."""

    grid: int
    tiling: tuple[int, int, int]
    split: int
    constants: dict[str, int]
    num_warps: int


def choose_blocks(kernel: str, v: View, dtype: torch.dtype, device: torch.device) -> Blocks:
    """Block sizes for a kernel, by name, over a view of tensors of this dtype on this device."""
    sms = _multiprocessors(device)
    return _heuristic(kernel, v.channels_fastest, dtype.itemsize, v.N, v.C, v.S, sms)


@lru_cache(maxsize=4096)
def _heuristic(
    kernel: str, channels_fastest: bool, itemsize: int, N: int, C: int, S: int, sms: int
) -> Blocks:
    tile = _TILE // 2 if itemsize == 8 else _TILE
    line = _LINE // itemsize
    if channels_fastest:
        block_c = _least_padding(C, line // 2, line)
        block_s = min(triton.next_power_of_2(max(1, S)), tile // block_c)
    else:
        block_s = _least_padding(S, line, tile)
        block_c = min(triton.next_power_of_2(C), tile // block_s)
    num_warps = min(4, max(1, block_c * block_s // 512))

    groups = triton.cdiv(C, block_c)
    tiles = N * triton.cdiv(S, block_s)
    filling = triton.cdiv(_PROGRAMS_PER_SM * sms, groups)
    if kernel in _REDUCTIONS:
        split = min(filling, tiles // _TILES_PER_SPLIT, _MAX_SPLIT)
    else:
        split = min(tiles, max(filling, triton.cdiv(tiles, _TILES_PER_PROGRAM)))
    return Blocks(block_c, block_s, max(1, split), num_warps)


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
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; 1 under the interpreter, which runs one program at a time."""
    if triton.knobs.runtime.interpret:
        return 1
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return properties["multiprocessor_count"]
