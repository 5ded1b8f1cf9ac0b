"""Block sizes worth timing for a shape: those that an analysis cannot rule out.

The heuristic's choice comes first. The others vary what it fixes: elements of a tile, its two
shapes with the least padding, flat or not, warps, and programs for each multiprocessor.
"""

from collections.abc import Iterator

import torch
import triton

from .blocks import Blocks, Cut, flat_tile, heuristic, multiprocessors
from .entries import MAX_SPLIT, MAX_TILE, REDUCTIONS
from .layout import View

_MIN_TILE = 512
_SHAPES_PER_SIZE = 2
# Padded elements for each that exists.
_MAX_PADDING = 2
# Bytes of the shortest row of a tile, half a cache line, and of the widest load.
_ROW = 64
_VECTOR = 16
_WARPS = (2, 4, 8)
# Elements of a warp around which to try: 16 a thread, as the heuristic has.
_PER_WARP = 512
_PROGRAMS_PER_SM = (2, 8, 32)
# Bytes in flight for each multiprocessor that hide the latency of device memory; or else programs
# are over after this many tiles.
_IN_FLIGHT = 20 * 1024
_FEW_TILES = 8


def candidates(kernel: str, v: View, dtype: torch.dtype, device: torch.device) -> list[Blocks]:
    """Blocks for a kernel over a view, no two of which cut it alike."""
    found = {(first := heuristic(kernel, v, dtype, device)).cut(v): first}
    sms = multiprocessors(device)
    for tile in _tiles(v, dtype.itemsize):
        for num_warps in _warps(tile, v, dtype.itemsize):
            for split in _splits(kernel, tile, v, sms):
                blocks = tile._replace(num_warps=num_warps, split=split)
                cut = blocks.cut(v)
                if _keeps_busy(cut, dtype.itemsize, sms):
                    found.setdefault(cut, blocks)
    return list(found.values())


def _tiles(v: View, itemsize: int) -> list[Blocks]:
    tiles = [*_grid_tiles(v, itemsize), *_flat_tiles(v, itemsize)]
    return [tile for tile in tiles if _padded(tile, v) <= _MAX_PADDING * v.C * v.S]


def _sizes() -> range:
    """Exponents of the sizes of a tile."""
    return range(_MIN_TILE.bit_length() - 1, MAX_TILE.bit_length())


def _grid_tiles(v: View, itemsize: int) -> Iterator[Blocks]:
    """Of each size, the tiles with the least padding, and with the longest rows among equals."""
    fastest, other = _axes(v)
    longest, most_rows = triton.next_power_of_2(fastest), triton.next_power_of_2(other)
    shortest = min(longest, _ROW // itemsize)
    rows = [shortest << e for e in range((longest // shortest).bit_length())]
    for size in dict.fromkeys(min(1 << e, longest * most_rows) for e in _sizes()):
        shapes = [(size // row, row) for row in reversed(rows) if row <= size <= row * most_rows]
        tiles = [Blocks(*(shape[::-1] if v.channels_fastest else shape)) for shape in shapes]
        yield from sorted(tiles, key=lambda tile: _padded(tile, v))[:_SHAPES_PER_SIZE]


def _flat_tiles(v: View, itemsize: int) -> Iterator[Blocks]:
    """Where rows of a grid tile are no cache lines: of each size, the tile with the least idle."""
    if not v.dense or _axes(v)[0] % (_ROW // itemsize) == 0:
        return
    for e in _sizes():
        if shape := flat_tile(v.channels_fastest, v.C, v.S, 1 << e, _VECTOR // itemsize):
            yield Blocks(*shape, flat=True)


def _axes(v: View) -> tuple[int, int]:
    """Lengths of the dimension whose elements are neighbours in memory, and of the other."""
    return (v.C, v.S) if v.channels_fastest else (v.S, v.C)


def _padded(tile: Blocks, v: View) -> int:
    """Lanes of the tiles that cover all channels and positions of a sample."""
    lanes = triton.next_power_of_2(tile.BLOCK_C * tile.BLOCK_S)
    return triton.cdiv(v.C, tile.BLOCK_C) * triton.cdiv(v.S, tile.BLOCK_S) * lanes


def _warps(tile: Blocks, v: View, itemsize: int) -> list[int]:
    """Warps that get half to twice the elements of the heuristic's, or one for a small tile."""
    per_warp = _PER_WARP // 2 if itemsize == 8 else _PER_WARP
    if tile.flat:
        # Summing by channel takes as many registers again.
        per_warp //= 2
    elif _axes(v)[0] * itemsize % _VECTOR:
        # Each element is a load of its own.
        per_warp //= 4
    lanes = triton.next_power_of_2(tile.BLOCK_C * tile.BLOCK_S)
    fitting = [n for n in _WARPS if per_warp // 2 <= lanes // n <= per_warp * 2]
    return fitting or ([1] if lanes <= per_warp else [])


def _splits(kernel: str, tile: Blocks, v: View, sms: int) -> list[int]:
    """One program for each group of channels, and enough for every multiprocessor."""
    groups = triton.cdiv(v.C, tile.BLOCK_C)
    most = min(v.N * triton.cdiv(v.S, tile.BLOCK_S), MAX_SPLIT if kernel in REDUCTIONS else 2**31)
    return [1, *(min(most, triton.cdiv(n * sms, groups)) for n in _PROGRAMS_PER_SM)]


def _keeps_busy(cut: Cut, itemsize: int, sms: int) -> bool:
    """Whether enough bytes are in flight, or programs are short."""
    tiles_per_program, lanes = cut.sizes[4], cut.tile.BLOCK_C * cut.tile.BLOCK_S
    in_flight = cut.grid * lanes * itemsize
    return tiles_per_program <= _FEW_TILES or in_flight >= _IN_FLIGHT * sms
