"""What `on_gpu.py` prints of its records: counts and ratios. Times are in the JSON."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from gpu_records import Record

# Full-size tensors that each call must at least read and write.
TRAFFIC = {
    "channel_stats": 1,
    "normalize": 2,
    "backward_reduce": 2,
    "backward_input": 3,
    "forward": 3,
    "backward": 5,
}
_COPY = 2
_DIRECTIONS = ("forward", "backward")


def summary(part: str, records: list[Record], trusted: bool | None) -> Iterator[str]:
    """Lines about one part.

    Args:
        part: Its name.
        records: What it found, as far as it came.
        trusted: Whether parity holds; None where it was not checked. Decides on ratios of times.
    """
    checks = [r for r in records if "ok" in r]
    bad = [r for r in checks if not r["ok"]]
    skipped = [r for r in checks if "skipped" in r]
    passed = len(checks) - len(bad) - len(skipped)
    yield f"{part}: {passed} passed, {len(bad)} failed, {len(skipped)} skipped"
    if shares := [r for r in checks if isinstance(r.get("share"), float)]:
        r = max(shares, key=lambda r: r["share"])
        yield f"  worst error: {r['share']:.2f} of the tolerance ({r['worst']}, {_where(r)})"
    for r in bad:
        why = r.get("error", "").strip().splitlines()[-1:] or r.get("failed", [])
        worst = f" ({r['worst']}: {r['share']} of the tolerance)" if "share" in r else ""
        yield f"  FAILED {_where(r)}: {', '.join(why)}{worst}"
    if part == "speed":
        yield from _speed([r for r in checks if "times" in r], trusted)
        for r in skipped:
            yield f"  not timed: {_where(r)}: {r['skipped']}"
    if part == "tuning":
        yield from _tuning(records)


def _where(record: Record) -> str:
    keys = ("case", "shape", "format", "dtype")
    return ", ".join(str(record[key]) for key in keys if key in record) or "the run"


def _speed(timed: list[Record], trusted: bool | None) -> Iterator[str]:
    if trusted is False:
        yield "  no ratios: parity failed, and the times are those of kernels that are wrong"
        return
    if trusted is None:
        yield "  parity was not checked in this run"
    yield (
        "  Times faster than torch's operators, and share of a copy's bandwidth; the layer also "
        "against nn.BatchNorm, and the host's time for it against torch's SyncBatchNorm."
    )
    names = "".join(f"{what:>17}" for what in TRAFFIC)
    yield f"  {'':<41}{names}{'nn.BatchNorm':>15}{'host':>13}"
    for r in timed:
        ratios = "".join(
            f"{speed_up(r, what, 'torch'):>11.2f}{share_of_copy(r, what):>6.0%}" for what in TRAFFIC
        )
        native = "".join(f"{speed_up(r, what, 'native'):>7.2f}" for what in _DIRECTIONS)
        host = "".join(f"{speed_up(r, what, 'torch', 'host_ms'):>7.2f}" for what in _DIRECTIONS)
        yield f"  {r['shape']:<18}{r['format']:<14}{r['dtype']:<9}{ratios} {native}{host}"
    for dtype in sorted({r["dtype"] for r in timed}):
        of_dtype = [r for r in timed if r["dtype"] == dtype]
        means = (
            f"{what} {_geometric_mean(speed_up(r, what, who) for r in of_dtype):.2f} times {name}"
            for who, name in (("torch", "torch's SyncBatchNorm"), ("native", "nn.BatchNorm"))
            for what in _DIRECTIONS
        )
        yield f"  geometric mean of {len(of_dtype)} inputs in {dtype}: {', '.join(means)}"


def speed_up(record: Record, what: str, who: str, of: str = "device_ms") -> float:
    """How many times faster ours is than another's."""
    times = record["times"][what]
    return times[who][of]["median"] / times["ours"][of]["median"]


def share_of_copy(record: Record, what: str) -> float:
    """Bandwidth that ours achieves, of the least that it must move, over that of a copy."""
    times: dict[str, Any] = record["times"]
    copy_ms = times["copy"]["torch"]["device_ms"]["median"]
    return TRAFFIC[what] / _COPY * copy_ms / times[what]["ours"]["device_ms"]["median"]


def _geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def _tuning(records: list[Record]) -> Iterator[str]:
    entries = [entry for r in records for entry in r.get("entries", ())]
    for record in records:
        if "stopped" in record:
            yield f"  stopped {record['stopped']}"
    for e in entries:
        times = e["heuristic_us"] / e["tuned_us"]
        yield f"  {e['kernel']} N {e['N']} C {e['C']} S {e['S']}: {times:.2f} times the heuristic's"
