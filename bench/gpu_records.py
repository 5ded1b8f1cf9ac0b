"""How a part of `on_gpu.py` tells what it found: records, one JSON object a line on stdout.

A record with ``"expected"`` tells how many will follow; one with ``"ok": false`` is a failure. A
part that is cut short leaves the records it has written.
"""

import json
import math
import traceback
from collections.abc import Callable, Iterable
from typing import Any

Record = dict[str, Any]


def emit(records: Iterable[Record]) -> None:
    """Prints each record as soon as it is there."""
    for record in records:
        print(json.dumps(record), flush=True)


def parse(text: str) -> list[Record]:
    """The records among lines that may hold other output, or be cut short."""
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def attempt(about: Record, check: Callable[[], Record]) -> Record:
    """What a check finds, or the error it ends with, so that the next one still runs."""
    try:
        return about | check()
    except Exception:
        return about | {"ok": False, "error": traceback.format_exc()}


def verdict(found: dict[str, bool]) -> Record:
    """Whether all of it holds, and what does not."""
    return {"ok": all(found.values()), "failed": [name for name in found if not found[name]]}


def figure(value: float, digits: int = 4) -> float | str:
    """A number in a few significant digits; JSON knows no infinity."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
