"""Times calls that take turns, on the device from a cold cache and on the host."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from gpu_records import Record, figure

_WARM_UP = 3
_LEAST_ROUNDS, _MOST_ROUNDS = 8, 40
# Reads of this many bytes leave nothing else in a cache: the largest is 256 MiB (AMD MI300X).
_FLUSHED = 512 << 20

Call = Callable[[], object]


class Timer(Protocol):
    """Times one call, in milliseconds."""

    def device_ms(self, call: Call, host_ms: float) -> float: ...

    def host_ms(self, call: Call) -> float: ...


class EventTimer:
    """Times by the events of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.zeros(_FLUSHED // 4, device=device)
        for _ in range(_WARM_UP):
            self._flush()
        self._flush_ms = min(self._between_events(self._flush) for _ in range(_WARM_UP))

    def device_ms(self, call: Call, host_ms: float) -> float:
        """Time on the device, which is kept busy for twice as long as the host needs to queue."""
        for _ in range(max(1, math.ceil(2 * host_ms / self._flush_ms))):
            self._flush()
        return self._between_events(call)

    def host_ms(self, call: Call) -> float:
        """Time until a call returns."""
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def _flush(self) -> None:
        # Read, not written: lines to be written back would be counted to the next call.
        self._memory.sum()

    def _between_events(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def take_turns(calls: dict[tuple[str, str], Call], timer: Timer, seconds: float) -> Record:
    """Times of each call, in as many rounds as the time allows; at least a few."""
    for call in calls.values():
        for _ in range(_WARM_UP):
            call()
    host_ms = {key: [timer.host_ms(call)] for key, call in calls.items()}
    device_ms: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    start, rounds = time.monotonic(), 0
    while rounds < _LEAST_ROUNDS or (rounds < _MOST_ROUNDS and time.monotonic() - start < seconds):
        rounds += 1
        for key, call in calls.items():
            host_ms[key].append(timer.host_ms(call))
            device_ms[key].append(timer.device_ms(call, median(host_ms[key])))
    times: Record = {}
    for what, who in calls:
        spread = {
            "device_ms": percentiles(device_ms[what, who]),
            "host_ms": percentiles(host_ms[what, who]),
        }
        times.setdefault(what, {})[who] = spread
    return {"rounds": rounds, "times": times}


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def percentiles(values: Sequence[float]) -> Record:
    """The median, and how far the rest lies from it."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    marks = {"p10": ordered[tenth], "median": median(ordered), "p90": ordered[-1 - tenth]}
    return {name: figure(value) for name, value in marks.items()}
