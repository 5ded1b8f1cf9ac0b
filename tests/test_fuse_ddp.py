"""Fused networks train under DistributedDataParallel as torch's in one process."""

from typing import Any

import pytest
import torch
from fusible import NETWORKS, converted, images
from ranks import RankPool
from torch import Tensor, nn

from syncbn_triton import fuse_activations


def train_on_rank(rank: int, network: str, state: dict[str, Any], xs: list[Tensor]) -> list[Any]:
    """Two steps of a fused network under DistributedDataParallel."""
    model = converted(NETWORKS[network][0]())
    model.load_state_dict(state)
    assert fuse_activations(model).fused
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return train(parallel, xs[rank]) + list(model.state_dict().values())


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ys = []
    for _ in range(2):
        optimizer.zero_grad()
        ys.append(model(x))
        ys[-1].square().mean().backward()
        optimizer.step()
    model.eval()
    return [y.detach() for y in (*ys, model(x))]


@pytest.mark.parametrize("network", NETWORKS)
def test_two_ranks_train_as_one_process(ranks: RankPool, network: str) -> None:
    model, x = NETWORKS[network][0]().double(), images(6, 3, 8, 8)
    results = ranks.run(2, train_on_rank, network, model.state_dict(), list(x.chunk(2)))
    right = train(model, x)
    for i, y in enumerate(right):
        ours = torch.cat([result[i] for result in results])
        torch.testing.assert_close(ours, y, rtol=1e-10, atol=1e-10)
    for result in results:
        ours = dict(zip(model.state_dict(), result[len(right) :], strict=True))
        torch.testing.assert_close(ours, dict(model.state_dict()), rtol=1e-10, atol=1e-10)
