"""The real kernels on a GPU against the oracle, and what no tolerance covers.

Each case runs the four kernels twice: once with every allocation full of NaN, so that an unwritten
output fails, and once as usual, through the launch that the first has planned. Both must agree bit
by bit. The first is held against float64 on the CPU by the rule of ``tests/rounding.py``, which is
that of ``tests/oracle.py`` with room for one rounding of each term of a sum.

    python bench/gpu_parity.py bfloat16
"""

import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from gpu_cases import CASES, CONTIGUOUS, DTYPES, LAST, Case, make_layer, place
from gpu_records import Record, attempt, emit, figure, verdict
from oracle import Layer, Step, torch_step
from rounding import sizes_of_terms
from syncbn_triton.kernels.launchers import (
    backward_input,
    backward_reduce,
    channel_stats,
    normalize,
)
from torch import Tensor

NOT_FINITE = {
    "contiguous": ((8, 48, 28, 28), CONTIGUOUS),
    "channels-last": ((8, 48, 28, 28), LAST),
    "rows of 49": ((32, 64, 7, 7), CONTIGUOUS),
}


def run_kernels(layer: Layer, x: Tensor, dy: Tensor) -> tuple[Step, Tensor]:
    """One step through the four launchers on the device of x, and the counter after it."""
    weight, bias, running_mean, running_var = (
        None if t is None else t.to(x.device, copy=True)
        for t in (layer.weight, layer.bias, layer.running_mean, layer.running_var)
    )
    counter = torch.zeros((), dtype=torch.int64, device=x.device)
    tracked = (running_mean, running_var, counter)
    moments = channel_stats(x)
    y, stats = normalize(x, moments, weight, bias, *tracked, layer.momentum, layer.eps)
    dtypes = [None if t is None else t.dtype for t in (weight, bias)]
    sums, grad_weight, grad_bias = backward_reduce(x, dy, stats, *dtypes)
    dx = backward_input(x, dy, stats, weight, sums)
    grads = (None if weight is None else grad_weight, None if bias is None else grad_bias)
    return Step(y, dx, *grads, running_mean, running_var), counter


def run_on_nan(run: Callable[[], tuple[Step, Tensor]]) -> tuple[Step, Tensor]:
    """A run in which memory comes full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(False)


def shares_of_tolerance(step: Step, layer: Layer, x: Tensor, dy: Tensor) -> dict[str, float]:
    """Error of each part of a step, divided by what the rule allows; above 1, or NaN, fails."""
    exact = torch_step(layer, x, dy, torch.float64)
    torchs = torch_step(layer, x, dy, x.dtype)
    terms = sizes_of_terms(layer, x, dy)
    # fp64 is its own oracle: there, two orders of summation may differ by a few roundings.
    in_fp64 = x.dtype == torch.float64
    rounding = 16 * torch.finfo(torch.float64).eps if in_fp64 else torch.finfo(torch.float32).eps
    shares = {}
    for name, ours in vars(step).items():
        if ours is None:
            continue
        right = getattr(exact, name)
        ulp = max(torch.finfo(ours.dtype).eps, torch.finfo(x.dtype).eps)
        bound = 2 * (getattr(torchs, name).double() - right).abs().amax()
        bound += ulp * right.abs().amax() + rounding * getattr(terms, name).amax()
        shares[name] = ((ours.cpu().double() - right).abs().amax() / bound).item()
    return shares


def worst_of(shares: dict[str, float]) -> Record:
    """All shares, and the largest; NaN is larger than any."""
    worst = max(shares, key=lambda name: (math.isnan(shares[name]), shares[name]))
    figures = {name: figure(share) for name, share in shares.items()}
    return {"worst": worst, "share": figures[worst], "shares": figures}


def equal(one: Step, other: Step) -> bool:
    """Whether two steps are the same bit by bit, NaN equal to none."""
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(a is b if a is None else torch.equal(a, b) for a, b in pairs)


def check_case(case: Case, dtype: torch.dtype, device: torch.device) -> Record:
    """Both runs of a case."""
    torch.manual_seed(0)
    x, dy = ((torch.randn(case.size) + mean).to(dtype) for mean in (case.mean, 0.0))
    layer = make_layer(case, dtype)
    on_device = (
        place(x, case.memory_format, case, device),
        place(dy, case.dy_format or case.memory_format, replace(case, far=False), device),
    )
    run = partial(run_kernels, layer, *on_device)
    step, counter = run_on_nan(run)
    again, _ = run()
    shares = shares_of_tolerance(step, layer, x, dy)
    found = {
        "within tolerance": all(share <= 1 for share in shares.values()),
        "same twice": equal(step, again),
        "counted": counter.item() == 1,
        "as the input": all(
            t.dtype == dtype and t.is_contiguous(memory_format=case.memory_format)
            for t in (step.y, step.dx)
        ),
    }
    if case.y_error is not None:
        exact = torch_step(layer, x, dy, torch.float64).y
        error = (step.y.cpu().double() - exact).abs().amax().item()
        found["y within its bound"] = error <= case.y_error
    return verdict(found) | worst_of(shares)


def check_not_finite(
    size: tuple[int, ...],
    memory_format: torch.memory_format,
    dtype: torch.dtype,
    device: torch.device,
) -> Record:
    """NaN and infinity reach what they reach in torch, and no other channel."""
    torch.manual_seed(0)
    case = Case("", size, memory_format)
    layer = make_layer(case, dtype)
    clean = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    x, dy = (t.clone() for t in clean)
    x[0, 1].flatten()[0] = float("nan")
    x[-1, 2].flatten()[-1] = float("inf")
    dy[-1, 3].flatten()[0] = float("nan")
    torchs = torch_step(layer, x, dy, dtype)
    steps = [
        run_kernels(layer, *(place(t, memory_format, case, device) for t in pair))[0]
        for pair in ((x, dy), clean)
    ]
    ours, ours_clean = steps
    others = [c for c in range(size[1]) if c not in (1, 2, 3)]
    found = {}
    for name in ("y", "dx"):
        result, of_clean = (getattr(step, name).cpu() for step in steps)
        found[f"{name} as torch's"] = torch.equal(result.isnan(), getattr(torchs, name).isnan())
        found[f"{name} elsewhere"] = torch.equal(result[:, others], of_clean[:, others])
    buffers = (ours.running_mean, ours_clean.running_mean)
    found["running_mean elsewhere"] = torch.equal(*(t.cpu()[others] for t in buffers))
    found["running_var is not finite"] = not ours.running_var.cpu()[[1, 2]].isfinite().any()
    return verdict(found)


def check_empty(dtype: torch.dtype, device: torch.device) -> Record:
    """An empty batch packs zeros, leaves the running statistics, and takes over its peers'."""
    torch.manual_seed(0)
    peer = torch.randn(5, 24, 4, 6).to(device, dtype)
    empty = peer[:0]
    layer = make_layer(Case("", tuple(peer.shape)), dtype)
    step, counter = run_kernels(layer, empty, torch.empty_like(empty))
    found = {
        "zeros": channel_stats(empty).tolist() == [0.0] * 49,
        "not counted": counter.item() == 0,
        "empty": step.y.shape == step.dx.shape == empty.shape,
        "no gradients": not step.grad_weight.any() and not step.grad_bias.any(),
    }
    for name in ("running_mean", "running_var"):
        found[f"{name} left alone"] = torch.equal(getattr(step, name).cpu(), getattr(layer, name))
    tracked = []
    for x in (empty, peer):
        buffers = [t.to(device, copy=True) for t in (layer.running_mean, layer.running_var)]
        n = torch.zeros((), dtype=torch.int64, device=device)
        normalize(x, channel_stats(peer), None, None, *buffers, n, 0.1, 1e-5)
        tracked.append(torch.cat([*buffers, n.view(1)]))
    found["its peers' statistics"] = torch.equal(*tracked)
    return verdict(found)


def checks(dtype: str) -> dict[str, Callable[[torch.dtype, torch.device], Record]]:
    """Every check of a dtype, by name."""
    cases = {case.name: partial(check_case, case) for case in CASES if dtype in case.dtypes}
    not_finite = {
        f"NaN and infinity, {name}": partial(check_not_finite, *batch)
        for name, batch in NOT_FINITE.items()
    }
    return cases | not_finite | {"empty batch": check_empty}


def records(dtype: str, device: torch.device) -> Iterator[Record]:
    """A record for each check of a dtype."""
    to_do = checks(dtype)
    yield {"expected": len(to_do)}
    for name, check in to_do.items():
        about = {"case": name, "dtype": dtype}
        yield attempt(about, partial(check, getattr(torch, dtype), device))


def main() -> None:
    """Checks the dtypes named, or all."""
    # The oracle's threads: the dtypes are checked at one time.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(DTYPES)))
    for dtype in sys.argv[1:] or DTYPES:
        emit(records(dtype, torch.device("cuda", torch.cuda.current_device())))


if __name__ == "__main__":
    main()
