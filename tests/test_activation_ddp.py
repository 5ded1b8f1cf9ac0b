"""Layers with an activation train under DistributedDataParallel as torch's in one process."""

from collections.abc import Callable

import pytest
import torch
from composed import Composed, Tensors
from ranks import RankPool
from test_cases_layout import FP64, randn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_triton import SyncBatchNorm


class Network(nn.Module):
    """Two blocks, the second of which sees what the first made of all ranks' samples."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.norms = nn.ModuleList(norm() for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = norm(linear(x), x)
        return x


def train(model: nn.Module, xs: Tensor) -> Tensors:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in xs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    state = model.state_dict().items()
    return {name.removeprefix("module.").replace(".norm.", "."): t for name, t in state}


def train_with_ddp(rank: int, activation: str, xs: list[Tensor]) -> Tensors:
    network = Network(lambda: SyncBatchNorm(3, activation=activation))
    return train(DistributedDataParallel(network), xs[rank])


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_training_with_ddp(ranks: RankPool, activation: str) -> None:
    xs = randn(3, 6, 3)
    right = train(Network(lambda: Composed(activation)), xs)
    for state in ranks.run(2, train_with_ddp, activation, xs.chunk(2, dim=1)):
        torch.testing.assert_close(state, right, **FP64)
