"""Process groups: whose statistics a layer takes, who may call it, and how groups are made."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import Layer, Step, assert_step
from ranks import RankPool
from test_cases_ranks import random_layer
from test_parity import step_on_rank
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm, new_sync_groups

Groups = list[tuple[int, ...]]


def gathered(results: list[dict[str, Any]]) -> Step:
    """What the ranks of a group computed together."""
    assert all(torch.equal(r["running_var"], results[0]["running_var"]) for r in results)
    return Step(
        y=torch.cat([r["y"] for r in results]),
        dx=torch.cat([r["dx"] for r in results]),
        grad_weight=torch.stack([r["grad_weight"] for r in results]).sum(0),
        grad_bias=torch.stack([r["grad_bias"] for r in results]).sum(0),
        running_mean=results[0]["running_mean"],
        running_var=results[0]["running_var"],
    )


def group_of(rank: int, groups: Groups) -> dist.ProcessGroup:
    """Creates all groups, and returns the one this rank is in."""
    created = [dist.new_group(list(members)) for members in groups]
    return next(g for g, members in zip(created, groups, strict=True) if rank in members)


def step_in_group(
    rank: int, groups: Groups, layer: Layer, xs: list[Tensor], dys: list[Tensor]
) -> dict[str, Any]:
    options = {"num_features": len(layer.bias), "process_group": group_of(rank, groups)}
    return step_on_rank(rank, options, layer, xs, dys, torch.contiguous_format)


@pytest.mark.parametrize(
    "groups",
    [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 2, 3), (1,)], [(0, 1, 2, 3)]],
    ids=str,
)
def test_r4_statistics_per_group(ranks: RankPool, backend: str, groups: Groups) -> None:
    """pytorch#38874: output, gradients and buffers are those of the group's own batch."""
    layer = random_layer(3)
    xs = [torch.randn(rank + 1, 3, 4) * (rank + 1) + rank for rank in range(4)]
    dys = [torch.randn_like(x) for x in xs]
    results = ranks.run(4, step_in_group, groups, layer, xs, dys, backend=backend)
    for members in groups:
        x, dy = (torch.cat([shares[rank] for rank in members]) for shares in (xs, dys))
        assert_step(gathered([results[rank] for rank in members]), layer, x, dy)


def chain_of_groups(rank: int, xs: list[Tensor], dys: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A layer of pairs, between layers of all ranks; in float64."""
    pair = group_of(rank, [(0, 1), (2, 3)])
    model = nn.Sequential(
        SyncBatchNorm(3),
        nn.Tanh(),
        SyncBatchNorm(3, process_group=pair),
        nn.Tanh(),
        SyncBatchNorm(3),
    ).double()
    x = xs[rank].requires_grad_()
    y = model(x)
    y.backward(dys[rank])
    return y.detach(), x.grad


def test_r4_layers_of_one_model_in_different_groups(ranks: RankPool, backend: str) -> None:
    xs, dys = torch.randn(2, 4, 2, 3, 5, dtype=torch.float64)
    xs = xs * torch.arange(1, 5).view(4, 1, 1, 1)
    results = ranks.run(4, chain_of_groups, list(xs), list(dys), backend=backend)
    x = xs.flatten(0, 1).requires_grad_()
    norm = nn.BatchNorm1d(3, affine=False, dtype=torch.float64)
    pairs = norm(x).tanh().split(4)
    y = norm(torch.cat([norm(pair) for pair in pairs]).tanh())
    y.backward(dys.flatten(0, 1))
    for i, exact in enumerate((y, x.grad)):
        ours = torch.cat([result[i] for result in results])
        torch.testing.assert_close(ours, exact.detach(), rtol=1e-12, atol=1e-12)


def call_with_group_of(rank: int, members: tuple[int, ...], x: Tensor) -> Tensor | None:
    """Training as a member of the group, an error for the others; evaluation for all."""
    group = dist.new_group(list(members))
    module = SyncBatchNorm(3, process_group=group)
    if rank in members:
        module(x + rank).sum().backward()
        return module.running_mean
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match="process group") as error:
        module(x)
    assert f"rank {rank} is not in" in str(error.value)
    assert str(group) in str(error.value)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert module.eval()(x).shape == x.shape
    return None


@pytest.mark.parametrize(("world_size", "members"), [(2, (0,)), (2, (1,)), (3, (0, 2))], ids=str)
def test_r5_a_rank_outside_the_group_may_not_train(
    ranks: RankPool, backend: str, world_size: int, members: tuple[int, ...]
) -> None:
    """The error names rank and group; members go on undisturbed."""
    x = torch.randn(2, 3, 4)
    running_means = ranks.run(world_size, call_with_group_of, members, x, backend=backend)
    whole = torch.cat([x + rank for rank in members]).double()
    exact = torch.zeros(3, dtype=torch.float64)
    F.batch_norm(whole, exact, torch.ones(3, dtype=torch.float64), training=True)
    for rank in members:
        torch.testing.assert_close(running_means[rank].double(), exact, rtol=0, atol=1e-6)


def new_groups_recorded(rank: int, size: int | None) -> tuple[list[list[int]], list[int], bool]:
    """Groups created, in order; members of the one returned; whether it is the default group."""
    with patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        group = new_sync_groups(size)
    total = torch.full((1,), rank)
    dist.all_reduce(total, group=group)
    members = dist.get_process_group_ranks(group)
    assert total.item() == sum(members)
    created = [call.args[0] for call in new_group.call_args_list]
    return created, members, group is dist.group.WORLD


@pytest.mark.parametrize(
    ("world_size", "size", "groups"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (4, 1, [[0], [1], [2], [3]]),
        (4, 4, [[0, 1, 2, 3]]),
        (3, None, [[0, 1, 2]]),
    ],
    ids=str,
)
def test_r6_every_rank_creates_every_group_in_the_same_order(
    ranks: RankPool, world_size: int, size: int | None, groups: list[list[int]]
) -> None:
    """pytorch#48804; without a size, a communicator of its own for all ranks."""
    results = ranks.run(world_size, new_groups_recorded, size)
    for rank, (created, members, is_default) in enumerate(results):
        assert created == groups
        assert members == next(group for group in groups if rank in group)
        assert not is_default


def refused_size(rank: int, size: int) -> str:
    with (
        patch.object(dist, "new_group") as new_group,
        pytest.raises(ValueError, match="divides the world size") as error,
    ):
        new_sync_groups(size)
    new_group.assert_not_called()
    return str(error.value)


@pytest.mark.parametrize("size", [2, 4, 0, -1])
def test_r6_a_size_that_does_not_divide_the_world_is_refused(ranks: RankPool, size: int) -> None:
    for error in ranks.run(3, refused_size, size):
        assert f"world size of 3 (got {size})" in error


def collectives_of_a_step_in_own_group(rank: int) -> tuple[int, int]:
    group = new_sync_groups()
    module = SyncBatchNorm(3, process_group=group)
    module(torch.randn(2, 3, 4)).sum().backward()
    return tuple(g._get_sequence_number_for_group() for g in (dist.group.WORLD, group))


def test_r6_own_communicator_leaves_the_default_group_alone(ranks: RankPool) -> None:
    assert ranks.run(2, collectives_of_a_step_in_own_group) == [(0, 2), (0, 2)]
