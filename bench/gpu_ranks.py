"""Two ranks on one GPU, synchronized over gloo, against the oracle on their batches together.

gloo copies what it reduces to the host and back: slow, but the layer's own path, collectives
included, runs as it does over NCCL, which refuses two ranks on one device.

    python bench/gpu_ranks.py
"""

import os
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
from gpu_cases import CONTIGUOUS, LAST, Case, make_layer
from gpu_parity import shares_of_tolerance, worst_of
from gpu_records import Record, attempt, emit, verdict
from oracle import Layer, Step
from ranks import RankPool
from torch import Tensor

from syncbn_triton import SyncBatchNorm

# Both ranks compile in it.
_TIMEOUT = timedelta(seconds=60)


class Split(NamedTuple):
    """Samples on each rank, and what a sample is."""

    samples: tuple[int, ...]
    size: tuple[int, ...]
    memory_format: torch.memory_format
    dtype: torch.dtype


CASES = {
    "even": Split((4, 4), (64, 14, 14), CONTIGUOUS, torch.bfloat16),
    "even, channels-last": Split((4, 4), (64, 14, 14), LAST, torch.float16),
    "uneven": Split((1, 7), (64, 14, 14), CONTIGUOUS, torch.float32),
    "uneven, channels-last": Split((1, 7), (64, 14, 14), LAST, torch.bfloat16),
    "uneven, rows of 49": Split((3, 29), (64, 7, 7), CONTIGUOUS, torch.float64),
    "one empty": Split((5, 0), (64, 14, 14), CONTIGUOUS, torch.bfloat16),
    "one empty, 2-D": Split((0, 70), (96,), CONTIGUOUS, torch.float32),
}


def step_on_rank(
    rank: int,
    device: str,
    layer: Layer,
    xs: list[Tensor],
    dys: list[Tensor],
    memory_format: torch.memory_format,
) -> dict[str, Tensor]:
    """One training step on this rank's share of the batch; results on the CPU."""
    assert layer.weight is not None
    module = SyncBatchNorm(xs[rank].shape[1], device=device, dtype=layer.weight.dtype)
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            getattr(module, name).copy_(getattr(layer, name))
    x, dy = (t[rank].to(device).contiguous(memory_format=memory_format) for t in (xs, dys))
    x.requires_grad_()
    y = module(x)
    dx, grad_weight, grad_bias = torch.autograd.grad(y, [x, module.weight, module.bias], dy)
    results = {
        "y": y.detach(),
        "dx": dx,
        "grad_weight": grad_weight,
        "grad_bias": grad_bias,
        "running_mean": module.running_mean,
        "running_var": module.running_var,
        "num_batches_tracked": module.num_batches_tracked,
    }
    return {name: t.cpu() for name, t in results.items()}


def check(split: Split, device: torch.device, pool: RankPool) -> Record:
    """One step on all ranks."""
    torch.manual_seed(0)
    size = (sum(split.samples), *split.size)
    layer = make_layer(Case("", size), split.dtype)
    x, dy = (torch.randn(size).to(split.dtype) for _ in range(2))
    # Clones: a share would carry the whole batch to its rank.
    xs, dys = ([part.clone() for part in t.split(split.samples)] for t in (x, dy))
    arguments = (str(device), layer, xs, dys, split.memory_format)
    results = pool.run(len(xs), step_on_rank, *arguments, backend="auto", timeout=_TIMEOUT)
    step = Step(
        torch.cat([r["y"] for r in results]),
        torch.cat([r["dx"] for r in results]),
        *(sum(r[name].double() for r in results) for name in ("grad_weight", "grad_bias")),
        results[0]["running_mean"],
        results[0]["running_var"],
    )
    shares = shares_of_tolerance(step, layer, x, dy)
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    found = {
        "within tolerance": all(share <= 1 for share in shares.values()),
        "ranks agree": all(torch.equal(*(r[name] for r in results)) for name in buffers),
        "counted": results[0]["num_batches_tracked"].item() == 1,
    }
    return verdict(found) | worst_of(shares)


def records(device: torch.device, pool: RankPool) -> Iterator[Record]:
    """A record for each case."""
    yield {"expected": len(CASES)}
    for name, split in CASES.items():
        about = {"case": name, "dtype": str(split.dtype).removeprefix("torch.")}
        yield attempt(about, partial(check, split, device, pool))


def main() -> None:
    """Runs all cases in one pool of ranks."""
    # Both ranks are on this machine, which may know no network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with closing(RankPool()) as pool:
        emit(records(torch.device("cuda", torch.cuda.current_device()), pool))


if __name__ == "__main__":
    main()
