"""Times block sizes for one shape, and keeps the fastest in the user's table.

The two kernels of a direction are timed together, since the second starts on what the first left in
the cache. From the heuristic's blocks on, each kernel in turn takes the fastest of its candidates
beside the other's, until neither changes. It all happens on tensors of its own, with random numbers
of their own, and without a collective: ranks may tune at different times, to different results.
"""

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError

from .blocks import Blocks
from .candidates import candidates
from .entries import Entry, Key, key_of
from .launchers import backward_input, backward_reduce, channel_stats, normalize
from .layout import View, view
from .plan import forget_plans
from .results import accumulator_dtype, empty_like_input, empty_statistics
from .tables import device_name, remember, tables

PAIRS = {
    "forward": ("channel_stats", "normalize"),
    "backward": ("backward_reduce", "backward_input"),
}
_ROUNDS = 3

Run = Callable[[Blocks, Blocks], object]


class Case(NamedTuple):
    """What is tuned for: ``(N, C, *)`` sizes, the strides of x and dy, dtype and device."""

    size: tuple[int, ...]
    x_strides: tuple[int, ...]
    dy_strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def views(self, pair: str) -> tuple[View, View]:
        """How the two kernels of a pair view their tensors."""
        x = torch.empty_strided(self.size, self.x_strides, dtype=self.dtype, device="meta")
        y_strides = empty_like_input(x).stride()
        if pair == "forward":
            return view(self.size, self.x_strides), view(self.size, self.x_strides, y_strides)
        strides = self.x_strides, self.dy_strides
        return view(self.size, *strides), view(self.size, *strides, y_strides)

    def keys(self, pair: str) -> list[Key]:
        """The keys of the two kernels of a pair."""
        views = zip(PAIRS[pair], self.views(pair), strict=True)
        return [key_of(kernel, v, self.dtype) for kernel, v in views]


def tune(case: Case, pair: str) -> list[Entry]:
    """Entries for the two kernels of a pair.

    Raises:
        torch.OutOfMemoryError: Up to four tensors of this size do not fit beside what is there.
    """
    with _on(case.device):
        views = zip(PAIRS[pair], case.views(pair), strict=True)
        choices = [candidates(kernel, v, case.dtype, case.device) for kernel, v in views]
        run = _forward(case) if pair == "forward" else _backward(case)
        heuristic = [blocks[0] for blocks in choices]
        # An error here is no candidate's: it is what the shape would run into untuned.
        run(*heuristic)
        best = _descend(run, choices)
        # The least of many timings is partly luck: both once more, and longer.
        before, after = (_microseconds(run, *b, milliseconds=100) for b in (heuristic, best))
    if after >= before:
        best, after = heuristic, before
    record = (round(before, 3), round(after, 3), triton.__version__)
    return [
        Entry(*key, *blocks, *record) for key, blocks in zip(case.keys(pair), best, strict=True)
    ]


def _descend(run: Run, choices: list[list[Blocks]]) -> list[Blocks]:
    """Each kernel's fastest blocks beside the other's."""
    time = cache(partial(_microseconds, run))
    best = [blocks[0] for blocks in choices]
    for _ in range(_ROUNDS):
        before = list(best)
        for i, blocks in enumerate(choices):
            times = [time(*best[:i], each, *best[i + 1 :]) for each in blocks]
            best[i] = blocks[times.index(min(times))]
        if best == before:
            break
    return best


def _microseconds(run: Run, first: Blocks, second: Blocks, *, milliseconds: int = 20) -> float:
    """The median time of a pair of launches, infinite for blocks that the GPU cannot run."""
    benchmark = triton.runtime.driver.active.get_benchmarker()
    length = {"warmup": milliseconds // 4, "rep": milliseconds}
    try:
        median, _, _ = benchmark(lambda: run(first, second), quantiles=(0.5, 0.2, 0.8), **length)
    except (OutOfResources, CompileTimeAssertionFailure, PTXASError):
        return float("inf")
    return float(median) * 1e3


def _random(case: Case, strides: tuple[int, ...]) -> Tensor:
    """Random numbers, from a generator of their own, in all memory that the strides reach."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(case.size, strides, strict=True))
    generator = torch.Generator(case.device).manual_seed(0)
    memory = torch.empty(extent, dtype=case.dtype, device=case.device)
    return memory.normal_(generator=generator).as_strided(case.size, strides)


def _forward(case: Case) -> Run:
    x, C = _random(case, case.x_strides), case.size[1]
    weight, bias, mean, var = (x.new_ones(C, dtype=accumulator_dtype(x)) for _ in range(4))
    counter = x.new_zeros((), dtype=torch.int64)

    def run(first: Blocks, second: Blocks) -> None:
        moments = channel_stats(x, first)
        normalize(x, moments, weight, bias, mean, var, counter, 0.1, 1e-5, blocks=second)

    return run


def _backward(case: Case) -> Run:
    x, dy = _random(case, case.x_strides), _random(case, case.dy_strides)
    weight, stats = x.new_ones(case.size[1], dtype=accumulator_dtype(x)), empty_statistics(x)
    stats.fill_(1.0)

    def run(first: Blocks, second: Blocks) -> None:
        sums, _, _ = backward_reduce(x, dy, stats, weight.dtype, weight.dtype, blocks=first)
        backward_input(x, dy, stats, weight, sums, blocks=second)

    return run


def tune_unseen(kernel: str, v: View, dtype: torch.dtype, device: torch.device) -> None:
    """Tunes for a view that no table has, where a launch may take its time."""
    name, key = device_name(device), key_of(kernel, v, dtype)
    if name is None or any(table.exact(key) for table in tables(name)):
        return
    if torch.compiler.is_compiling() or _is_capturing(device):
        return
    pair = next(pair for pair, kernels in PAIRS.items() if kernel in kernels)
    case = case_of(v, dtype, device)
    # Not where y's format depends on more than the view tells: tensors that have to be copied.
    if key in case.keys(pair):
        _tune_once(name, case, pair)


@cache
def _tune_once(name: str, case: Case, pair: str) -> None:
    _, dtype, layout, *sizes = case.keys(pair)[1]
    where = f"{pair} of (N, C, S) = {tuple(sizes)}, {layout}, {dtype}"
    try:
        entries = tune(case, pair)
    except torch.OutOfMemoryError:
        entries = []
        warnings.warn(f"no memory to tune {where}: its block sizes stay untuned", stacklevel=2)
    release_memory(case.device)
    if entries:
        remember(name, entries)
        us = f"{entries[0].heuristic_us:.1f} us before, {entries[0].tuned_us:.1f} us after"
        print(f"syncbn_triton: tuned {where} for {name}: {us}", file=sys.stderr, flush=True)


def release_memory(device: torch.device) -> None:
    """Gives back what tuning allocated, and drops its plans and those it made out of date."""
    forget_plans()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def case_of(v: View, dtype: torch.dtype, device: torch.device) -> Case:
    """Tensors that have this view: images of one column, whose y has the format of x.

    Or sequences, where y is contiguous though x is not.
    """
    columns = 0 if v.channels_fastest and any(t.c != 1 for t in v.strides) else 1
    size = (v.N, v.C, v.S, 1)[: 3 + columns]
    # A folded batch has a stride of 0; this one makes it the outermost dimension.
    strides = [(t.n if v.N > 1 else v.C * v.S, t.c, t.s, t.s)[: 3 + columns] for t in v.strides]
    return Case(size, strides[0], strides[min(1, len(strides) - 1)], dtype, device)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device current: Triton's benchmark takes its time on the current one."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def _is_capturing(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    return bool(getattr(module, "is_current_stream_capturing", lambda: False)())
