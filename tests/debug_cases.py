"""Small models whose layers debug mode has to tell apart, and ranks that treat them differently."""

import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_triton import convert_sync_batchnorm, sync_batch_norm


class Block(nn.Module):
    def __init__(self, C: int) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.norm = nn.BatchNorm1d(C)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).tanh()


class Net(nn.Module):
    """Layers of qualified names: ``blocks.0.norm`` and ``blocks.1.norm``."""

    def __init__(self, C: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(C), Block(C)])

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.blocks[0](x)
        return x if skip else self.blocks[1](x)


class OtherNet(Net):
    """Another model, with layers of the same names."""


class Repeated(nn.Module):
    """Calls one layer several times."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        for _ in range(times):
            x = self.norm(x).tanh()
        return x


class Functional(nn.Module):
    """Calls the function, after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, features: int = 3) -> Tensor:
        return normalize(self.norm(x)[:, :features])


def normalize(x: Tensor) -> Tensor:
    return sync_batch_norm(x, None, None, training=True)


def synchronized(model: nn.Module, ddp: bool = False) -> nn.Module:
    model = convert_sync_batchnorm(model)
    return DistributedDataParallel(model, broadcast_buffers=False) if ddp else model


def train(model: nn.Module, C: int = 3, **options: int) -> None:
    """Forward and backward on a random batch."""
    x = torch.randn(2, C, dtype=next(model.parameters()).dtype)
    model(x, **options).sum().backward()


def layer_in_evaluation(rank: int, ddp: bool) -> None:
    model = Net()
    model.blocks[1].norm.train(rank == 0)
    train(synchronized(model, ddp))


def models_in_another_order(rank: int, ddp: bool) -> None:
    models = [synchronized(model, ddp) for model in (Net(), OtherNet())]
    for model in models[:: -1 if rank else 1]:
        train(model)


def layer_replaced_after_a_step(rank: int, ddp: bool) -> None:
    model = synchronized(Net(), ddp)
    train(model)
    # Makes new layers, of the same parameters.
    train(convert_sync_batchnorm(model, dist.group.WORLD), skip=rank == 1)


def functional_outside_of_modules(rank: int, ddp: bool) -> None:
    train(synchronized(Repeated(), ddp))
    normalize(torch.randn(2, 3 + rank))


def told(rank: int, direction: str, layer: str, number: int, rest: str = "") -> str:
    """A pattern for what is told of a rank's call; the name may begin with those of wrappers."""
    return rf"rank {rank}: .*{direction} of '[\w.]*{re.escape(layer)}'.* call {number}, .*{rest}"


# What each of two ranks does, and what both are told.
DISAGREEMENTS: dict[str, tuple[Callable[[int, bool], None], list[str]]] = {
    "layer skipped": (
        lambda rank, ddp: train(synchronized(Net(), ddp), skip=rank == 1),
        [told(0, "forward", "blocks.1.norm", 1), told(1, "backward", "blocks.0.norm", 1)],
    ),
    "layer called once less": (
        lambda rank, ddp: train(synchronized(Repeated(), ddp), times=2 - rank),
        [told(0, "forward", "norm", 2), told(1, "backward", "norm", 1)],
    ),
    "layer in evaluation": (
        layer_in_evaluation,
        [
            told(0, "forward", "blocks.1.norm", 1, "training"),
            told(1, "forward", "blocks.1.norm", 1, "evaluating"),
        ],
    ),
    "other channels": (
        lambda rank, ddp: train(synchronized(Net(3 + rank)), 3 + rank),
        [
            told(0, "forward", "blocks.0.norm", 1, "3 channels of float32, training"),
            told(1, "forward", "blocks.0.norm", 1, "4 channels of float32, training"),
        ],
    ),
    "other dtype": (
        lambda rank, ddp: train(synchronized(Net().double() if rank else Net())),
        [
            told(0, "forward", "blocks.0.norm", 1, "3 channels of float32, training"),
            told(1, "forward", "blocks.0.norm", 1, "3 channels of float64, training"),
        ],
    ),
    "models in another order": (
        models_in_another_order,
        [told(0, "forward", "blocks.0.norm", 1), told(1, "forward", "blocks.0.norm", 1)],
    ),
    "layer replaced after a step": (
        layer_replaced_after_a_step,
        [r"rank 0: forward of '[\w.]*blocks\.1\.norm'"],
    ),
    # Named after the module that calls, or none: not after the layer that has just returned.
    "functional call in a module": (
        lambda rank, ddp: train(synchronized(Functional(), ddp), features=3 - rank),
        [rf"rank {rank}: forward of (?!'(\w+\.)*norm').* {3 - rank} channels" for rank in range(2)],
    ),
    "functional call outside of modules": (
        functional_outside_of_modules,
        [rf"rank {rank}: forward of (?!'(\w+\.)*norm').* {3 + rank} channels" for rank in range(2)],
    ),
}
