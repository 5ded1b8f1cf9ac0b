"""Training as one of torchrun's ranks, which `test_two_hosts` starts on each of two hosts.

Arguments: a folder for what the ranks leave, a number of steps, and the seconds after which a
collective of training times out.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_triton import convert_sync_batchnorm
from syncbn_triton.demo.network import Network, load

IMAGES_PER_STEP = 8


def network() -> nn.Module:
    """In the same state at every call."""
    torch.manual_seed(0)
    return Network().double()


def train(
    model: nn.Module,
    steps: int,
    rank: int = 0,
    world_size: int = 1,
    after_step: Callable[[int], object] = lambda step: None,
) -> list[float]:
    """Trains on this rank's share of each step's images; returns the losses."""
    digits, _ = load(0, torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(steps):
        images = torch.arange(IMAGES_PER_STEP) + step * IMAGES_PER_STEP
        share = images.chunk(world_size)[rank] % len(digits.images)
        loss = F.cross_entropy(model(digits.images[share].double()), digits.classes[share])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after_step(step)
    return losses


def main(folder: Path, steps: int, timeout: float) -> None:
    # Ranks meet with the default timeout: some start late on a machine busy with something else.
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    net = convert_sync_batchnorm(network(), group)
    model = DistributedDataParallel(net, process_group=group)
    step_file = folder / f"{rank}.step"
    try:
        losses = train(model, steps, rank, world_size, lambda step: step_file.write_text(f"{step}"))
    except Exception:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        wait_for_neighbours(folder, 2 * timeout)
        raise
    torch.save((losses, net.state_dict()), folder / f"{rank}.pt")
    dist.destroy_process_group()


def wait_for_neighbours(folder: Path, seconds: float) -> None:
    """Until all ranks of this host have failed: with the first to leave, torchrun ends the rest."""
    count = int(os.environ["LOCAL_WORLD_SIZE"])
    first = int(os.environ["GROUP_RANK"]) * count
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all((folder / f"{rank}.error").exists() for rank in range(first, first + count)):
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
