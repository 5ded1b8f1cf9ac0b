"""Times the layer against others side by side: their forward, backward, both, and peak memory.

===========================  =======================================================================
ours                         ``SyncBatchNorm``: Triton on a GPU, ATen on the CPU
ours, no collective          the same in a group of one rank, while as many ranks as ever are busy:
                             the synchronized path less its all-reduces
nn.BatchNorm                 synchronizes with nobody; all ratios are to it
torch.nn.SyncBatchNorm       on GPUs; torch refuses it on the CPU
sum of squares               a synchronized layer in plain torch, over ``[sum | sum of squares]``
F.batch_norm, compiled       by ``torch.compile``; synchronizes with nobody; on a few inputs, since
                             each takes seconds to compile
===========================  =======================================================================

A world of one has the threads that torch takes, ranks of a world of two have one each, over gloo.
Contestants take turns, a step each, in a new order each time; ranks start a step together, and the
slowest rank's time counts. Layers that compute different things fail. On the CPU, batches of the
suite are cut so that an input has at most 2^21 elements, and what has more in one sample is left
out; freed memory is kept, or page faults would be timed with whoever meets them. On a GPU a time
ends when the device is done, and holds what the host takes; `gpu_speed.py` separates them.

    python bench/compare.py
"""

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
from compare_table import draw, markdown, write_csv, write_json
from contestants import COMPILED, layers, must_agree, peak_memory
from gpu_records import Record
from gpu_speed import Case
from machine import conditions, quartiles
from ranks import RankPool
from shapes import SUITE, Shape, formats
from torch import Tensor, nn
from tqdm import tqdm

BENCH = Path(__file__).parent
WORLDS = (1, 2)
SECONDS = 150
# Elements of an input on the CPU.
MOST_ELEMENTS = 1 << 21
COMPILED_SHAPES = ("resnet50 64x56", "resnet50 2048x7", "simclr head")
_WARM_UP = 2
_KEPT_BYTES = 1 << 30
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 41
# A first step compiles.
_TIMEOUT = timedelta(seconds=90)


def cut(shape: Shape, most: int) -> Shape | None:
    """The shape with a batch of at most so many elements, or None where a sample has more."""
    sample = math.prod(shape.size[1:])
    N = min(shape.size[0], most // sample)
    return shape._replace(size=(N, *shape.size[1:])) if N else None


def suite(most: int | None, names: Sequence[str] | None = None) -> list[Case]:
    """Inputs to time: no empty ones, each size once, in each of its formats."""
    shapes = [s for s in SUITE if names is None or s.name in names]
    if most is not None:
        shapes = [small for s in shapes if (small := cut(s, most)) is not None]
    shapes = list({s.size: s for s in reversed(shapes) if math.prod(s.size)}.values())[::-1]
    return [Case(s, f, torch.float32) for s in shapes for f in formats(s)]


def time_on_rank(
    rank: int, case: Case, device_type: str, threads: int, seconds: float, compiled: bool
) -> Record:
    """Seconds of each contestant's forward and backward in each round, and its memory."""
    torch.set_num_threads(threads)
    torch.manual_seed(rank)
    device = torch.device(device_type)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    x, dy = case.batch(device).requires_grad_(), case.batch(device)
    # All ranks create all groups.
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    contestants = layers(x, groups[rank] if len(groups) > 1 else None, compiled)
    must_agree(contestants, x, dy)
    memory = {name: peak_memory(layer, x, dy) for name, layer in contestants.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for turn in range(_WARM_UP):
        if turn == _WARM_UP - 1:
            start = time.perf_counter()
        for layer in contestants.values():
            _timed_step(layer, x, dy)
    rounds = torch.tensor(seconds / (time.perf_counter() - start))
    dist.broadcast(rounds, 0)
    # In an order of chance, the same on all ranks: who came before decides what caches hold.
    order = random.Random(0)
    for _ in range(int(rounds.clamp(_LEAST_ROUNDS, _MOST_ROUNDS))):
        for name in order.sample(list(contestants), len(contestants)):
            times[name].append(_timed_step(contestants[name], x, dy))
    return {"bytes": x.nbytes, "memory": memory, "times": times}


def _timed_step(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[float, float]:
    dist.barrier()
    leaves = [x, *layer.parameters()]
    start = _now(x)
    y = layer(x)
    between = _now(x)
    torch.autograd.grad(y, leaves, dy)
    return between - start, _now(x) - between


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def merged(case: Case, world: int, of_ranks: list[Record]) -> Record:
    """Medians and quartiles of the slowest rank's milliseconds."""
    times: Record = {}
    for name in of_ranks[0]["times"]:
        by_rank = torch.tensor([r["times"][name] for r in of_ranks], dtype=torch.float64)
        forward, backward = by_rank.amax(0).unbind(1)
        both = by_rank.sum(2).amax(0)
        spans = {"forward": forward, "backward": backward, "both": both}
        times[name] = {what: quartiles(ms.mul(1e3)) for what, ms in spans.items()}
    memory = {name: max(r["memory"][name] for r in of_ranks) for name in times}
    rounds = len(of_ranks[0]["times"][next(iter(times))])
    about = case.about() | {"world": world, "rounds": rounds, "bytes": of_ranks[0]["bytes"]}
    return about | {"memory": memory, "times": times}


def measure(
    pool: RankPool,
    cases: Sequence[Case],
    worlds: Sequence[int],
    device: str,
    seconds: float,
    compiled: bool = True,
) -> list[Record]:
    """A record for each case in each world; each has its share of the time that is left."""
    records = []
    end = time.monotonic() + seconds
    turns = [(world, case) for world in worlds for case in cases]
    for i, (world, case) in enumerate(tqdm(turns, unit="case", leave=False)):
        share = max(0.0, end - time.monotonic()) / (len(turns) - i)
        threads = torch.get_num_threads() if world == 1 else 1
        # Half of it for what is not repeated.
        compiles = compiled and case.shape.name in COMPILED_SHAPES
        arguments = (case, device, threads, share / 2, compiles)
        # Where kernels are interpreted, auto would take those.
        backend = "aten" if device == "cpu" else "auto"
        of_ranks = pool.run(world, time_on_rank, *arguments, backend=backend, timeout=_TIMEOUT)
        records.append(merged(case, world, of_ranks))
    return records


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes JSON, CSV, PNG and Markdown, and prints the last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--worlds", nargs="+", type=int, choices=WORLDS, default=WORLDS)
    parser.add_argument("--shapes", nargs="+", help="names in shapes.py; all unless given")
    parser.add_argument("--most", type=int, help="elements of an input; on the CPU, 2^21")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all cases")
    parser.add_argument("--no-compile", action="store_true", help=f"leaves out {COMPILED}")
    parser.add_argument("--out", type=Path, default=BENCH / "results", help="folder to write to")
    options = parser.parse_args(arguments)
    most = options.most or (MOST_ELEMENTS if options.device == "cpu" else None)
    cases = suite(most, options.shapes)
    # All ranks are on this machine, which may know no network.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for limit in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.setdefault(limit, str(_KEPT_BYTES))
    # Ranks are killed, which a compiler's own processes would outlive.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    result = conditions(options.device)
    with closing(RankPool()) as pool:
        result["records"] = measure(
            pool, cases, options.worlds, options.device, options.seconds, not options.no_compile
        )
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "compare.json", result)
    write_csv(options.out / "compare.csv", result)
    draw(options.out / "compare.png", result)
    text = markdown(result)
    (options.out / "compare.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
