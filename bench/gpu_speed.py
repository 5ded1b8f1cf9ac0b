"""Times the kernels and the layer against torch's, and against a copy, on a GPU.

========================  ======================================================================
what                      torch's side
========================  ======================================================================
channel_stats             ``batch_norm_stats``
normalize                 ``batch_norm_gather_stats_with_counts`` and ``batch_norm_elemt``, which
                          together do the same work
backward_reduce           ``batch_norm_backward_reduce``
backward_input            ``batch_norm_backward_elemt``
forward, backward         the layer by autograd: all operators of ``torch.nn.SyncBatchNorm`` for one
                          rank, and ``nn.BatchNorm``
========================  ======================================================================

Half input has fp32 parameters. Contestants take turns, one call each; a figure is the median of the
turns, beside the 10th and 90th percentiles. Device time is taken by events, from a cold cache; a
call is queued before the device reaches it, as far as it does not wait for the device itself. Host
time is what a call takes to return while the device is idle.

    python bench/gpu_speed.py
"""

import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import gpu_peers
import torch
from gpu_records import Record, attempt, emit, figure
from gpu_timer import Call, EventTimer, Timer, take_turns
from shapes import SUITE, Shape, formats
from syncbn_triton.kernels.launchers import (
    backward_input,
    backward_reduce,
    channel_stats,
    normalize,
)
from torch import Tensor

from syncbn_triton import SyncBatchNorm

# For all cases, compiling included.
SECONDS = 180
# Bytes a case takes at its peak, in sizes of x: x, dy, three y, what backward saves, results.
_ROOM = 16
_COMPILERS = 8


class Case(NamedTuple):
    """One input to time."""

    shape: Shape
    memory_format: torch.memory_format
    dtype: torch.dtype

    def about(self) -> Record:
        """What tells the case from others."""
        last = self.memory_format != torch.contiguous_format
        return {
            "shape": self.shape.name,
            "size": list(self.shape.size),
            "format": "channels-last" if last else "contiguous",
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def batch(self, device: torch.device) -> Tensor:
        """Random values in this size, format and dtype."""
        x = torch.randn(self.shape.size, device=device, dtype=self.dtype)
        return x.contiguous(memory_format=self.memory_format)


def cases() -> list[Case]:
    """The suite in its formats, bf16 first: what a run has no time for is fp32."""
    return [
        Case(shape, memory_format, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for shape in SUITE
        for memory_format in formats(shape)
    ]


def contestants(x: Tensor, dy: Tensor) -> dict[tuple[str, str], Call]:
    """Calls to time, by what they do and who does it."""
    return (
        {("copy", "torch"): partial(torch.empty_like(x).copy_, x)} | kernels(x, dy) | steps(x, dy)
    )


def kernels(x: Tensor, dy: Tensor) -> dict[tuple[str, str], Call]:
    """The four kernels and the operators that they stand for."""
    C, device, eps, momentum = x.shape[1], x.device, gpu_peers.EPS, gpu_peers.MOMENTUM
    # One by one: rows of one tensor would start off their alignment.
    weight, bias, running_mean, running_var = (torch.rand(C, device=device) + 0.5 for _ in range(4))
    counter = torch.zeros((), dtype=torch.int64, device=device)
    tracked = (running_mean, running_var, counter)
    moments = channel_stats(x)
    _, stats = normalize(x, moments, weight, bias, *tracked, momentum, eps)
    sums, _, _ = backward_reduce(x, dy, stats, weight.dtype, bias.dtype)

    mean, invstd = torch.batch_norm_stats(x, eps)
    rows = mean.unsqueeze(0), invstd.unsqueeze(0)
    count = torch.full((1,), x.numel() // C, dtype=mean.dtype, device=device)
    of_all = torch.tensor([x.numel() // C], dtype=torch.int32, device=device)
    saved = (dy, x, mean, invstd, weight)
    sum_dy, sum_dy_xmu, *_ = torch.batch_norm_backward_reduce(*saved, True, True, True)

    def gather_and_normalize() -> Tensor:
        of_ranks = gpu_peers.gathered(x, *rows, count, (running_mean, running_var))
        return torch.batch_norm_elemt(x, weight, bias, *of_ranks, eps)

    return {
        ("channel_stats", "ours"): partial(channel_stats, x),
        ("channel_stats", "torch"): partial(torch.batch_norm_stats, x, eps),
        ("normalize", "ours"): partial(
            normalize, x, moments, weight, bias, *tracked, momentum, eps
        ),
        ("normalize", "torch"): gather_and_normalize,
        ("backward_reduce", "ours"): partial(
            backward_reduce, x, dy, stats, weight.dtype, bias.dtype
        ),
        ("backward_reduce", "torch"): partial(
            torch.batch_norm_backward_reduce, *saved, True, True, True
        ),
        ("backward_input", "ours"): partial(backward_input, x, dy, stats, weight, sums),
        ("backward_input", "torch"): partial(
            torch.batch_norm_backward_elemt, *saved, sum_dy, sum_dy_xmu, of_all
        ),
    }


def steps(x: Tensor, dy: Tensor) -> dict[tuple[str, str], Call]:
    """Forward and backward of the layers, after a step that must agree."""
    C, device, eps, momentum = x.shape[1], x.device, gpu_peers.EPS, gpu_peers.MOMENTUM
    layers = {
        "ours": SyncBatchNorm(C, eps, momentum, device=device),
        "torch": gpu_peers.SequenceLayer(C, eps, momentum, device=device),
        "native": gpu_peers.native(C, x.dim(), device),
    }
    x = x.detach().requires_grad_()
    calls: dict[tuple[str, str], Call] = {}
    for who, layer in layers.items():
        leaves = [x, *layer.parameters()]
        backward = partial(torch.autograd.grad, layer(x), leaves, dy, retain_graph=True)
        calls["forward", who] = partial(layer, x)
        calls["backward", who] = backward
    must_agree(calls, x.dtype)
    return calls


def must_agree(calls: dict[tuple[str, str], Any], dtype: torch.dtype) -> None:
    """Fails where layers compute different things: then it is idle to ask which is faster."""
    tolerance = 1e-3 if dtype == torch.float32 else 4e-2
    for who in ("ours", "torch"):
        pairs = {
            "y": (calls["forward", who](), calls["forward", "native"]()),
            "dx": (calls["backward", who]()[0], calls["backward", "native"]()[0]),
        }
        for name, (actual, expected) in pairs.items():
            message = partial("{} by {}: {}".format, name, who)
            torch.testing.assert_close(
                actual, expected, rtol=tolerance, atol=tolerance, msg=message
            )


def time_case(case: Case, device: torch.device, timer: Timer, seconds: float) -> Record:
    """Times of all contestants on one input."""
    torch.manual_seed(0)
    x, dy = case.batch(device), case.batch(device)
    return {"ok": True, "bytes": x.nbytes, **take_turns(contestants(x, dy), timer, seconds)}


def reason_to_skip(case: Case, device: torch.device, seconds_left: float) -> str | None:
    """Why a case is not timed, if it is not."""
    numel = math.prod(case.shape.size)
    if numel == 0:
        return "empty: nothing moves"
    if seconds_left <= 0:
        return "no time left"
    needed = _ROOM * numel * case.dtype.itemsize
    if device.type != "cpu" and needed > torch.cuda.mem_get_info(device)[0]:
        return f"needs {needed >> 20} MiB of memory"
    return None


def records(
    to_time: Sequence[Case], device: torch.device, timer: Timer, seconds: float
) -> Iterator[Record]:
    """A record for each case, each with its share of the time."""
    end = time.monotonic() + seconds
    for i, case in enumerate(to_time):
        left = end - time.monotonic()
        if reason := reason_to_skip(case, device, left):
            yield case.about() | {"ok": True, "skipped": reason}
            continue
        share = left / (len(to_time) - i)
        yield attempt(case.about(), partial(time_case, case, device, timer, share))
        if device.type != "cpu":
            torch.cuda.empty_cache()


def compile_case(case: Case, device: str) -> None:
    """Leaves the kernels of a case in Triton's cache."""
    x = case.batch(torch.device(device)).requires_grad_()
    SyncBatchNorm(x.shape[1], device=device)(x).backward(x.detach())
    if x.device.type != "cpu":
        del x
        torch.cuda.empty_cache()


def compile_ahead(to_time: Sequence[Case], device: torch.device, seconds: float) -> None:
    """Compiles in many processes; what fails or takes too long, timing meets by itself."""
    workers = min(_COMPILERS, max(1, (os.cpu_count() or 1) // 2))
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    jobs = [
        executor.submit(compile_case, case, str(device))
        for case in to_time
        if not reason_to_skip(case, device, seconds)
    ]
    wait(jobs, timeout=seconds)
    executor.shutdown(cancel_futures=True)


def main() -> None:
    """Times the suite."""
    start = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    to_time = cases()
    emit([{"expected": len(to_time)}])
    compile_ahead(to_time, device, SECONDS / 2)
    emit([{"compiled_s": figure(time.monotonic() - start)}])
    left = SECONDS - (time.monotonic() - start)
    emit(records(to_time, device, EventTimer(device), left))


if __name__ == "__main__":
    main()
