"""An entry of a table of tuned block sizes, and what a line must hold to be one."""

import json
from typing import Any, NamedTuple

import torch

from .layout import View

SCHEMA = 1
REDUCTIONS = ("channel_stats", "backward_reduce")
KERNELS = (*REDUCTIONS, "normalize", "backward_input")
DTYPES = ("float16", "bfloat16", "float32", "float64")
DENSE_LAYOUTS = ("contiguous", "channels-last")
LAYOUTS = (*DENSE_LAYOUTS, *(f"{layout} strided" for layout in DENSE_LAYOUTS))
# Elements of a tile: 32 a thread at 8 warps, which is what fits in registers.
MAX_TILE = 8192
# Programs that a group of channels is split over: the rows that a merge adds up in one tile.
MAX_SPLIT = 1024
# 1024 threads, the most of a program, where a warp has 64.
MAX_WARPS = 16
# Half of the most that CUDA launches: an entry serves shapes of up to twice its size.
MAX_GRID = 2**30


class Key(NamedTuple):
    """What blocks are chosen by: a kernel over a view."""

    kernel: str
    dtype: str
    layout: str
    N: int
    C: int
    S: int


class Entry(NamedTuple):
    """A line of a table: blocks for a key.

    The microseconds are those of the pair of kernels that was timed together, with the blocks of
    the heuristic and with the tuned ones.
    """

    kernel: str
    dtype: str
    layout: str
    N: int
    C: int
    S: int
    BLOCK_C: int
    BLOCK_S: int
    split: int
    num_warps: int
    flat: bool
    heuristic_us: float
    tuned_us: float
    triton: str

    @property
    def key(self) -> Key:
        return Key(*self[:6])

    @property
    def blocks(self) -> tuple[int, int, int, int, bool]:
        """The fields of `Blocks`, in order."""
        return self[6:11]


def key_of(kernel: str, v: View, dtype: torch.dtype) -> Key:
    """The key of a kernel over a view of tensors of this dtype."""
    layout = DENSE_LAYOUTS[v.channels_fastest] + ("" if v.dense else " strided")
    return Key(kernel, str(dtype).removeprefix("torch."), layout, v.N, v.C, v.S)


def fastest(key: Key) -> int:
    return key.C if key.layout.startswith("channels-last") else key.S


def serialize(entry: Entry) -> str:
    """The line of an entry."""
    return json.dumps({"schema": SCHEMA, **entry._asdict()})


def parse(line: str) -> Entry:
    """The entry of a line.

    Raises:
        ValueError: It is none, or no kernel can be launched with it.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(fields, dict) or fields.pop("schema", None) != SCHEMA:
        raise ValueError(f"not of schema {SCHEMA}")
    for name, kind in Entry.__annotations__.items():
        _check(fields.get(name), kind, name)
    if unknown := fields.keys() - set(Entry._fields):
        raise ValueError(f"unknown field {min(unknown)}")
    entry = Entry(**fields)
    _check_names(entry)
    _check_blocks(entry)
    return entry


def _check(value: Any, kind: type, name: str) -> None:
    kinds = (float, int) if kind is float else (kind,)
    if type(value) not in kinds:
        raise ValueError(f"expected {name} to be {kind.__name__} (got {value!r})")
    if type(value) is not bool and isinstance(value, (int, float)) and not 0 < value < 2**63:
        raise ValueError(f"{name} is out of range (got {value!r})")


def _check_names(entry: Entry) -> None:
    for name, known in (("kernel", KERNELS), ("dtype", DTYPES), ("layout", LAYOUTS)):
        if getattr(entry, name) not in known:
            raise ValueError(f"unknown {name} {getattr(entry, name)!r}")


def _check_blocks(entry: Entry) -> None:
    powers = ["num_warps"] if entry.flat else ["num_warps", "BLOCK_C", "BLOCK_S"]
    for name in powers:
        if (value := getattr(entry, name)) & (value - 1):
            raise ValueError(f"expected {name} to be a power of two (got {value})")
    if entry.flat:
        whole = entry.BLOCK_C if entry.layout == "channels-last" else entry.BLOCK_S
        if entry.layout not in DENSE_LAYOUTS or whole != fastest(entry.key):
            raise ValueError("expected a flat tile to hold whole rows or positions of dense memory")
    # A flat tile is padded to a power of two, and so is MAX_TILE.
    _check_most("BLOCK_C * BLOCK_S", entry.BLOCK_C * entry.BLOCK_S, MAX_TILE)
    _check_most("num_warps", entry.num_warps, MAX_WARPS)
    if entry.kernel in REDUCTIONS:
        _check_most("split", entry.split, MAX_SPLIT)
    tiles = entry.N * -(-entry.S // entry.BLOCK_S)
    _check_most("the grid", -(-entry.C // entry.BLOCK_C) * min(entry.split, tiles), MAX_GRID)


def _check_most(name: str, value: int, most: int) -> None:
    if value > most:
        raise ValueError(f"expected {name} to be at most {most} (got {value})")
