"""Training of a small network, alone or under torch's wrappers across ranks.

Across 2 ranks of unequal shares, right is torch's own layer in one process on the whole batch, in
float64 within its rounding. `docs/integrations.md` shows how each wrapper is written.
"""

import functools
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from syncbn_triton import convert_sync_batchnorm

State = dict[str, Tensor]
# Samples of the batch on each rank.
SPLIT = (2, 4)
STEPS = 3
FP64 = {"rtol": 1e-12, "atol": 1e-12}
# A process imports DTensor and its operators with the first wrapper, which takes seconds.
TIMEOUT = timedelta(seconds=60)
# Below the norms of the gradients of these steps, so that each is clipped.
MAX_NORM = 0.1


def block(C: int, K: int) -> nn.Sequential:
    # Without the bias, whose gradient before a norm is 0 but for rounding.
    return nn.Sequential(nn.Conv2d(C, K, 3, bias=False), nn.BatchNorm2d(K), nn.Tanh())


class Net(nn.Module):
    """Two blocks and a head, and a second head for some of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(block(3, 4), block(4, 6))
        self.head = nn.Linear(6, 2)
        self.aside = nn.Linear(6, 2)

    def forward(self, x: Tensor, aside: Tensor) -> Tensor:
        x = self.blocks(x).mean((2, 3))
        y = self.head(x)
        # Of none of its samples on a rank, that rank leaves the head out of its graph.
        return y + self.aside(x) * aside[:, None] if aside.any() else y


def net(dtype: torch.dtype = torch.float64) -> Net:
    """In the same state at every call."""
    torch.manual_seed(1)
    return Net().to(dtype)


def converted() -> nn.Module:
    return convert_sync_batchnorm(net())


def batches(everywhere: bool = True, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """For each step input, which samples have the second head, and targets."""
    torch.manual_seed(2)
    total = sum(SPLIT)
    # Apart from one rank to the other, so that neither's own statistics are those of both.
    offsets = torch.arange(total).view(-1, 1, 1, 1)
    aside = torch.ones(total) if everywhere else torch.tensor([1.0] * SPLIT[0] + [0.0] * SPLIT[1])
    return [
        [
            (torch.randn(total, 3, 6, 6) + offsets).to(dtype),
            aside.to(dtype),
            torch.randn(total, 2).to(dtype),
        ]
        for _ in range(STEPS)
    ]


def share(rank: int, steps: Iterable[list[Tensor]]) -> list[list[Tensor]]:
    return [[t.split(SPLIT)[rank] for t in step] for step in steps]


def loss_of(model: nn.Module, x: Tensor, aside: Tensor, target: Tensor) -> Tensor:
    """The mean over the batch of all ranks, times ranks: wrappers take the mean of gradients."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    total = sum(SPLIT) * target.shape[1]
    return (model(x, aside) - target).square().sum() * (world_size / total)


def train(
    model: nn.Module,
    steps: Iterable[list[Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
    max_norm: float | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> list[float]:
    """Trains, and returns the norms of gradients that clipping saw."""
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    norms = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, *step).backward()
        if max_norm is not None:
            norm = clip_grad_norm_(model.parameters(), max_norm)
            norms.append(whole(norm).item())
        optimizer.step()
        after_step()
    return norms


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def state(model: nn.Module) -> State:
    """Parameters and buffers, under the names of the bare model."""
    return {
        name.removeprefix("module."): whole(t).detach().clone()
        for name, t in model.state_dict().items()
    }


def assert_each_is(states: Iterable[State], right: State) -> None:
    for actual in states:
        torch.testing.assert_close(actual, right, **FP64)


def sharded(model: nn.Module, layout: str, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    """The model under FSDP2, its norms as the layout says."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = functools.partial(fully_shard, mesh=mesh)
    policy = MixedPrecisionPolicy() if policy is None else policy
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    ignored = {p for norm in norms for p in norm.parameters()}
    if layout == "norms apart":
        # Sharded, but in the precision of their parameters.
        for norm in norms:
            shard(norm, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    if layout == "norms whole":
        # Neither sharded nor reduced: what fully_shard ignores is left to the user.
        for p in ignored:
            p.register_post_accumulate_grad_hook(reduce_gradient)
        shard = functools.partial(shard, ignored_params=ignored)
    if layout != "one unit":
        for child in model.blocks:
            shard(child, mp_policy=policy)
    return shard(model, mp_policy=policy)


def reduce_gradient(parameter: Tensor) -> None:
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
