"""Bytes and latency of the layer's collectives for up to 16 ranks, and what follows for more.

============  ======================================================================================
ours          forward: all-reduce of ``2C + 1`` fp64; backward: all-reduce of ``2C`` fp64
all-gather    as ``torch.nn.SyncBatchNorm``: all-gather of ``2C + 1`` fp32, then all-reduce of
              ``2C`` fp32
============  ======================================================================================

Ranks are gloo processes of one thread on this machine. Bytes are what the kernel counts as sent on
the loopback interface, headers and acknowledgements included, divided by the ranks, in a network
namespace of the run's own where the system allows one; otherwise what others send in the meantime
is estimated from an idle moment. Latency is the slowest rank's, from a barrier on. With more ranks
than CPUs it is mostly the wait for a CPU.

    python bench/scale.py
"""

import argparse
import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist
from gpu_records import Record
from machine import conditions, quartiles
from ranks import RankPool
from scale_model import draw, fit, markdown
from tqdm import tqdm

BENCH = Path(__file__).parent
WORLDS = (2, 4, 8, 16)
CHANNELS = (64, 512, 2048)
SECONDS = 110
ROUNDS, COUNTED = 21, 20
_WARM_UP = 3
_IDLE, _SETTLED = 0.2, 0.01
_TIMEOUT = timedelta(seconds=40)
# From <sched.h>, <linux/sockios.h> and <linux/if.h>.
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def enter_own_network() -> bool:
    """Moves this process, and those it starts, to a network where nobody else sends."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET) != 0:
            return False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            request = struct.pack("16sH14x", b"lo", 0)
            _, flags = struct.unpack("16sH14x", fcntl.ioctl(s, _SIOCGIFFLAGS, request))
            fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    except (AttributeError, OSError):
        return False
    return True


def sent(interface: str) -> int:
    """Bytes that left by an interface so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"expected a network interface of this machine (got {interface!r})")


def collectives(C: int, ranks: int) -> dict[tuple[str, str], Callable[[], object]]:
    """What each layer sends in each direction."""
    ours, ours_back = (torch.zeros(n, dtype=torch.float64) for n in (2 * C + 1, 2 * C))
    theirs, theirs_back = (torch.zeros(n) for n in (2 * C + 1, 2 * C))
    gathered = [torch.empty_like(theirs) for _ in range(ranks)]
    return {
        ("ours", "forward"): partial(dist.all_reduce, ours),
        ("ours", "backward"): partial(dist.all_reduce, ours_back),
        ("all-gather", "forward"): partial(dist.all_gather, gathered, theirs),
        ("all-gather", "backward"): partial(dist.all_reduce, theirs_back),
    }


def measure_on_rank(rank: int, channels: Sequence[int], interface: str) -> list[Record]:
    """Seconds of each call, and bytes of one call by all ranks together."""
    found = []
    ranks = dist.get_world_size()
    per_second = _idle(interface)
    barriers = _counted(interface, per_second, 0, lambda: None)
    for C in channels:
        for (who, direction), call in collectives(C, ranks).items():
            for _ in range(_WARM_UP):
                call()
            times = [_timed(call) for _ in range(ROUNDS)]
            total = _counted(interface, per_second, COUNTED, call)
            about = {"ranks": ranks, "C": C, "who": who, "direction": direction}
            found.append(about | {"times": times, "bytes": max(0.0, total - barriers) / COUNTED})
    return found


def _timed(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _idle(interface: str) -> float:
    """Bytes that others send in a second."""
    dist.barrier()
    time.sleep(_SETTLED)
    before = sent(interface)
    time.sleep(_IDLE)
    return (sent(interface) - before) / _IDLE


def _counted(interface: str, per_second: float, times: int, call: Callable[[], object]) -> float:
    """Bytes that some calls and two barriers send, less others'."""
    dist.barrier()
    time.sleep(_SETTLED)
    before, start = sent(interface), time.perf_counter()
    dist.barrier()
    for _ in range(times):
        call()
    dist.barrier()
    time.sleep(_SETTLED)
    others = per_second * (time.perf_counter() - start)
    return sent(interface) - before - others


def merged(of_ranks: Sequence[list[Record]]) -> list[Record]:
    """A record for each collective: the slowest rank's milliseconds, bytes as rank 0 saw them."""
    records = []
    for same in zip(*of_ranks, strict=True):
        first = same[0]
        times = torch.tensor([r["times"] for r in same], dtype=torch.float64).amax(0)
        about = {key: first[key] for key in ("ranks", "C", "who", "direction")}
        counted = {"bytes_per_rank": first["bytes"] / first["ranks"]}
        records.append(about | counted | {"ms": quartiles(times * 1e3)})
    return records


def measure(
    pool: RankPool, worlds: Sequence[int], channels: Sequence[int], interface: str, seconds: float
) -> list[Record]:
    """Records of all worlds that there is time for."""
    end = time.monotonic() + seconds
    records = []
    for ranks in tqdm(sorted(worlds), unit="world", leave=False):
        if time.monotonic() > end:
            print(f"no time left for {ranks} ranks", file=sys.stderr)
            continue
        arguments = (measure_on_rank, channels, interface)
        records += merged(pool.run(ranks, *arguments, timeout=_TIMEOUT))
    return records


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes JSON, PNG and Markdown, and prints the last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS, help="numbers of ranks")
    parser.add_argument("--channels", nargs="+", type=int, default=CHANNELS)
    parser.add_argument("--interface", help="counts what it sends; a loopback of our own if absent")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of it")
    parser.add_argument("--out", type=Path, default=BENCH / "results", help="folder to write to")
    options = parser.parse_args(arguments)
    interface = options.interface or "lo"
    own = options.interface is None and enter_own_network()
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    result = conditions("cpu") | {"interface": interface, "own_network": own}
    with closing(RankPool()) as pool:
        records = measure(pool, options.worlds, options.channels, interface, options.seconds)
    result |= {"records": records, "model": fit(records, os.cpu_count() or 1)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(options.out / "scale.png", result)
    text = markdown(result)
    (options.out / "scale.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
