"""Tables of tuned block sizes: one JSON Lines file for each device, one entry a line.

The user's own table is in a cache folder, ``$SYNCBN_TRITON_CACHE``, or ``syncbn-triton`` in
``$XDG_CACHE_HOME`` or ``~/.cache``. Those in ``configs/`` come with the package. An entry serves
the shapes near its own. What cannot be read is left out, with one warning for each file.
"""

import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
import triton

from .entries import Entry, Key, fastest, parse, serialize

# Sum over N, C and S of |log2 ratio| up to which an entry serves another shape: twice the size.
_NEAR = 1.0
# Bytes of the widest load.
_VECTOR = 16
# Bytes that are no text make their line a broken one, and stay as they are.
_TEXT = {"encoding": "utf-8", "errors": "surrogateescape"}
SHIPPED = Path(__file__).parent / "configs"


def device_name(device: torch.device) -> str | None:
    """The name of a GPU, which names its tables; None where there is none, or kernels interpret."""
    if device.type == "cpu" or triton.knobs.runtime.interpret:
        return None
    name = torch.get_device_module(device).get_device_name(device)
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("_")


class Table:
    """Entries, by kernel, dtype and layout, and then by shape."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, str], dict[Key, Entry]] = {}

    def add(self, entry: Entry) -> None:
        self._entries.setdefault(entry[:3], {})[entry.key] = entry

    def exact(self, key: Key) -> Entry | None:
        return self._entries.get(key[:3], {}).get(key)

    def nearest(self, key: Key) -> Entry | None:
        """The entry of the nearest shape, if any is near enough to serve."""
        entries = list(self._entries.get(key[:3], {}).values())
        near = [(d, e) for e in entries if (d := _distance(key, e)) <= _NEAR and _serves(e, key)]
        return min(near)[1] if near else None


def _distance(key: Key, entry: Entry) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(key[3:], entry[3:6], strict=True))


def _serves(entry: Entry, key: Key) -> bool:
    """A flat tile holds whole rows of one length; a grid tile was tuned for loads of one width."""
    here, there = fastest(entry.key), fastest(key)
    vector = _VECTOR // getattr(torch, key.dtype).itemsize
    return here == there if entry.flat else math.gcd(here, vector) == math.gcd(there, vector)


def lookup(device: str, key: Key) -> Entry | None:
    """The entry that serves a key best in the user's table of a device, or else in ours."""
    return next((entry for table in tables(device) if (entry := table.nearest(key))), None)


def tables(device: str) -> tuple[Table, Table]:
    """The user's table of a device, and the one that comes with the package."""
    return _read(user_path(device)), _read(SHIPPED / f"{device}.jsonl")


def user_path(device: str) -> Path:
    """Where the user's table of a device is."""
    if not (folder := os.environ.get("SYNCBN_TRITON_CACHE")):
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(caches, "syncbn-triton")
    return Path(folder) / f"{device}.jsonl"


def remember(device: str, entries: Iterable[Entry]) -> None:
    """Adds entries to the user's table of a device, in this process even if not on disk."""
    path, entries = user_path(device), list(entries)
    try:
        write(path, entries)
    except (OSError, ImportError) as error:
        _warn(f"tuned block sizes are kept for this process alone: cannot write {path}: {error}")
    for entry in entries:
        _read(path).add(entry)


@lru_cache(maxsize=64)
def _read(path: Path) -> Table:
    table, ignored = Table(), []
    try:
        lines = _lines(path)
    except FileNotFoundError:
        return table
    except OSError as error:
        _warn(f"cannot read tuned block sizes: {error}")
        return table
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            table.add(parse(line))
        except ValueError as error:
            ignored.append(f"line {number}: {error}")
    if ignored:
        _warn(f"left out of the tuned block sizes in {path}: {'; '.join(ignored)}")
    return table


def _lines(path: Path) -> list[str]:
    return path.read_text(**_TEXT).split("\n")


@lru_cache(maxsize=64)
def _warn(message: str) -> None:
    """Warns once."""
    warnings.warn(message, stacklevel=2)


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Merges entries into a file, at once for all who read it; lines of other keys stay."""
    new = {entry.key: entry for entry in entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        old = _lines(path) if path.exists() else []
        lines = [line for line in old if line.strip() and _key(line) not in new]
        lines += [serialize(entry) for entry in new.values()]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in lines), **_TEXT)
        os.replace(temporary, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # not on Windows, where tables are read all the same

    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _key(line: str) -> Key | None:
    """None for a line that is not understood: a newer release may."""
    try:
        return parse(line).key
    except ValueError:
        return None
