"""The three arms, which share initial weights, batches and learning rates.

Step k of arm (b) takes the batches that the ranks take in step k of (a) and (c), put together. A
loss of (a) or (c) is the mean over the ranks, and so (b)'s loss where the networks agree.
"""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from ..backend import backend_for
from ..convert import convert_sync_batchnorm
from .config import TRAIN_IMAGES, Config
from .network import Digits, Network, load

LEARNING_RATE = 0.02
# With fewer images a step the rate is lower in proportion: the fewer values a statistic is taken
# from, the faster rounding errors grow from step to step.
FULL_RATE_IMAGES = 8
MOMENTUM = 0.9


@dataclass(frozen=True)
class Arm:
    """The loss of every step, and the share of held-out images classified right at the end."""

    losses: list[float]
    accuracy: float


@dataclass(frozen=True)
class Outcome:
    """The arms by letter, rank 0's device, and what `SyncBatchNorm` ran on there."""

    arms: dict[str, Arm]
    device: str
    backend: str


def train_on_rank(
    config: Config,
    rank: int,
    local_rank: int,
    local_world_size: int,
    meeting_point: str = "env://",
) -> Outcome | None:
    """Trains this rank's part of the arms.

    Args:
        config: The same on all ranks.
        rank: Among all ranks.
        local_rank: Among the ranks of this machine.
        local_world_size: Number of ranks on this machine.
        meeting_point: URL at which the ranks find each other.

    Returns:
        The outcome on rank 0, None on the others.
    """
    device = _prepare_device(local_rank, local_world_size)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        meeting_point,
        rank=rank,
        world_size=config.world_size,
    )
    train, held_out = load(config.seed, device)
    batches = _batches(config).to(device)
    torch.manual_seed(config.seed)
    initial = Network().to(device)
    networks = {
        "a": convert_sync_batchnorm(copy.deepcopy(initial)),
        "b": initial,
        "c": copy.deepcopy(initial),
    }
    losses = {}
    with tqdm(total=len(networks) * len(batches), unit="step", disable=rank != 0) as bar:
        for letter in ("a", "c"):
            bar.set_description(config.labels[letter])
            across_ranks = DistributedDataParallel(networks[letter])
            losses[letter] = _train(across_ranks, train, batches[:, rank], config, bar)
            dist.all_reduce(losses[letter])
            losses[letter] /= config.world_size
        # (b) comes last, so that no rank waits for it.
        dist.destroy_process_group()
        if rank != 0:
            return None
        bar.set_description(config.labels["b"])
        losses["b"] = _train(networks["b"], train, batches.flatten(1), config, bar)
    return Outcome(
        {
            letter: Arm(losses[letter].tolist(), _accuracy(network, held_out))
            for letter, network in networks.items()
        },
        torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        backend_for(device.type),
    )


def _prepare_device(local_rank: int, local_world_size: int) -> torch.device:
    """A GPU of its own for each rank where there are enough, else a share of the CPU."""
    if torch.cuda.device_count() < local_world_size:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_world_size))
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    # TF32 rounds to 11 bits, which would drown the differences looked for.
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", local_rank)


def _batches(config: Config) -> Tensor:
    """Indices of training images, ``(steps, world_size, batch_per_rank)``; epochs shuffle anew."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (config.steps_per_epoch, config.world_size, config.batch_per_rank)
    used = config.steps_per_epoch * config.global_batch
    epochs = [
        torch.randperm(TRAIN_IMAGES, generator=generator)[:used].view(shape)
        for _ in range(config.epochs)
    ]
    return torch.cat(epochs)[: config.max_steps]


def _train(network: nn.Module, data: Digits, batches: Tensor, config: Config, bar: tqdm) -> Tensor:
    """Takes one step for each of the batches ``(steps, n)``; returns its losses ``(steps,)``."""
    rate = LEARNING_RATE * min(1, config.global_batch / FULL_RATE_IMAGES)
    optimizer = torch.optim.SGD(network.parameters(), rate, MOMENTUM)
    # max_steps cuts the training short and leaves the steps before as they were.
    planned_steps = config.epochs * config.steps_per_epoch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, planned_steps)
    losses = torch.empty(len(batches), device=batches.device)
    for step, batch in enumerate(batches):
        loss = F.cross_entropy(network(data.images[batch]), data.classes[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses[step] = loss.detach()
        bar.update()
    return losses


@torch.no_grad()
def _accuracy(network: nn.Module, data: Digits) -> float:
    """Share of images classified right in evaluation, which communicates nothing."""
    network.eval()
    right = network(data.images).argmax(1) == data.classes
    return right.double().mean().item()
