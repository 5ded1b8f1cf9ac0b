"""Ranks with little, other or nothing to do: empty batches, evaluation, frozen parameters, joins.

Every case runs under the timeout of the process group, so that a hang fails.
"""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import Layer, Step, assert_near, assert_step
from ranks import RankPool
from test_parity import build, check_step, step_on_rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_triton import SyncBatchNorm, convert_sync_batchnorm

LOW_AND_SINGLE = [torch.float16, torch.bfloat16, torch.float32]


def random_layer(C: int, dtype: torch.dtype = torch.float32) -> Layer:
    weight, bias, mean, var = torch.rand(4, C).to(dtype) + 0.5
    return Layer(weight, bias, mean, var)


def collectives() -> int:
    """Collectives of the default group so far."""
    return dist.group.WORLD._get_sequence_number_for_group()


@pytest.mark.parametrize("split", [(2, 0), (0, 3, 0)], ids=str)
@pytest.mark.parametrize("size", [(3, 4, 4), (3,)], ids=str)
@pytest.mark.parametrize("dtype", LOW_AND_SINGLE, ids=str)
def test_r1_step_beside_empty_ranks(
    ranks: RankPool,
    backend: str,
    split: tuple[int, ...],
    size: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """pytorch#36530."""
    check_step(ranks, backend, split, size, dtype, torch.contiguous_format)


@pytest.mark.parametrize("split", [(2, 0), (0, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", LOW_AND_SINGLE, ids=str)
def test_r1_an_empty_rank_gets_empty_and_zero_gradients(
    ranks: RankPool, backend: str, split: tuple[int, ...], dtype: torch.dtype
) -> None:
    layer = random_layer(3, dtype)
    xs = torch.randn(sum(split), 3, 4, 4).to(dtype).split(split)
    arguments = ({"num_features": 3, "dtype": dtype}, layer, xs, xs, torch.contiguous_format)
    results = ranks.run(len(split), step_on_rank, *arguments, backend=backend)
    for samples, result in zip(split, results, strict=True):
        assert result["num_batches_tracked"] == min(sum(split), 1)
        if not samples:
            assert result["y"].shape == result["dx"].shape == (0, 3, 4, 4)
            assert result["grad_weight"].tolist() == result["grad_bias"].tolist() == [0.0] * 3
        if not sum(split):
            assert torch.equal(result["running_mean"], layer.running_mean)
            assert torch.equal(result["running_var"], layer.running_var)


@pytest.mark.parametrize("shape", [(2, 3, 0, 4), (2, 3, 0)], ids=str)
def test_r1_samples_without_pixels(ranks: RankPool, backend: str, shape: tuple[int, ...]) -> None:
    """Empty too: a batch is its values, not its samples."""
    layer, empty = random_layer(3), torch.empty(shape)
    x, dy = torch.randn(2, 2, 3, 5, *shape[3:])
    arguments = ({"num_features": 3}, layer, [empty, x], [empty, dy], torch.contiguous_format)
    without, full = ranks.run(2, step_on_rank, *arguments, backend=backend)
    assert without["y"].shape == without["dx"].shape == shape
    for result in (without, full):
        assert result.pop("num_batches_tracked") == 1
    assert_step(Step(**full), layer, x, dy)
    assert torch.equal(without["running_var"], full["running_var"])


def buffers_after(rank: int, momentum: float | None, batches: list[list[Tensor]]) -> list[Tensor]:
    module = SyncBatchNorm(3, momentum=momentum)
    for shares in batches:
        module(shares[rank])
    return [module.running_mean, module.running_var, module.num_batches_tracked]


@pytest.mark.parametrize("momentum", [0.3, None], ids=str)
def test_r1_a_batch_empty_on_all_ranks_never_happened(
    ranks: RankPool, backend: str, momentum: float | None
) -> None:
    batches = [torch.randn(sum(s), 3, 5).split(s) for s in [(0, 0), (2, 1), (0, 0), (0, 2)]]
    results = ranks.run(2, buffers_after, momentum, batches, backend=backend)
    whole = nn.BatchNorm1d(3, momentum=momentum, dtype=torch.float64)
    for shares in batches[1::2]:
        whole(torch.cat(shares).double())
    for mean, var, counter in results:
        torch.testing.assert_close(mean.double(), whole.running_mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(var.double(), whole.running_var, rtol=0, atol=1e-6)
        assert counter == 2


def evaluate_on_rank_zero(
    rank: int, track_running_stats: bool, layer: Layer, x: Tensor, dy: Tensor
) -> list[Tensor]:
    """Evaluation on rank 0 between two training steps of all ranks."""
    module = build({"num_features": 3, "track_running_stats": track_running_stats}, layer)
    result = []
    if rank == 0:
        before = collectives()
        module.eval()
        x.requires_grad_()
        y = module(x)
        y.backward(dy)
        assert collectives() == before
        result = [y.detach(), x.grad, module.weight.grad, module.bias.grad]
        module.train().zero_grad()
    module(x).sum().backward()
    assert module.num_batches_tracked is None or module.num_batches_tracked == 1
    return result


def evaluation(
    layer: Layer, batch_statistics: bool, x: Tensor, dy: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Output, and gradients of x, weight and bias, by torch in a dtype."""
    x, weight, bias = (
        t.detach().to(dtype, copy=True).requires_grad_() for t in (x, layer.weight, layer.bias)
    )
    running = (layer.running_mean.to(dtype), layer.running_var.to(dtype))
    statistics = (None, None) if batch_statistics else running
    y = F.batch_norm(x, *statistics, weight, bias, batch_statistics, 0.0, layer.eps)
    y.backward(dy.to(dtype))
    return [y.detach(), x.grad, weight.grad, bias.grad]


@pytest.mark.parametrize("track_running_stats", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_r2_one_rank_evaluates_alone(
    ranks: RankPool, backend: str, track_running_stats: bool, world_size: int
) -> None:
    """pytorch#56982."""
    layer, x, dy = random_layer(3), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    arguments = (track_running_stats, layer, x, dy)
    ours, *_ = ranks.run(world_size, evaluate_on_rank_zero, *arguments, backend=backend)
    exact, torchs = (
        evaluation(layer, not track_running_stats, x, dy, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    for i, name in enumerate(("y", "dx", "grad_weight", "grad_bias")):
        assert_near(name, ours[i], exact[i], torchs[i], torch.float32)


# Of x, weight and bias: which need a gradient. Where none does, there is no backward to run.
MASKS = [mask for mask in product((True, False), repeat=3) if any(mask)]


def gradients_under_masks(
    rank: int, pairs: list[tuple[Any, Any]], layer: Layer, xs: list[Tensor], dys: list[Tensor]
) -> list[list[Tensor | None]]:
    """Gradients of x, weight and bias of this rank for each pair of masks of two ranks."""
    gradients = []
    for masks in pairs:
        module = build({"num_features": 3}, layer)
        leaves = (xs[rank].clone(), module.weight, module.bias)
        for leaf, needs_grad in zip(leaves, masks[rank], strict=True):
            leaf.requires_grad_(needs_grad)
        module(leaves[0]).backward(dys[rank])
        gradients.append([leaf.grad for leaf in leaves])
    return gradients


def gradients_of_ranks(
    layer: Layer, xs: list[Tensor], dys: list[Tensor], dtype: torch.dtype
) -> list[list[Tensor]]:
    """Gradients of x, weight and bias of each rank, by torch on the whole batch in one dtype."""
    leaves = [
        [t.to(dtype, copy=True).requires_grad_() for t in (x, layer.weight, layer.bias)] for x in xs
    ]
    normalized = F.batch_norm(torch.cat([x for x, _, _ in leaves]), None, None, training=True)
    shares = normalized.split([len(x) for x in xs])
    for share, (_, weight, bias), dy in zip(shares, leaves, dys, strict=True):
        y = share * weight[:, None] + bias[:, None]
        y.backward(dy.to(dtype), retain_graph=True)
    return [[leaf.grad for leaf in own] for own in leaves]


def test_r3_ranks_that_need_different_gradients(ranks: RankPool, backend: str) -> None:
    """No hang, and right gradients exactly where they are asked for."""
    pairs = list(product(MASKS, repeat=2))[:: 1 if backend == "aten" else 5]
    layer, split = random_layer(3), (2, 1)
    xs, dys = torch.randn(3, 3, 4).split(split), torch.randn(3, 3, 4).split(split)
    results = ranks.run(2, gradients_under_masks, pairs, layer, xs, dys, backend=backend)
    exact, torchs = (
        gradients_of_ranks(layer, xs, dys, dtype) for dtype in (torch.float64, torch.float32)
    )
    for i, masks in enumerate(pairs):
        for rank, j in product(range(2), range(3)):
            gradient = results[rank][i][j]
            assert (gradient is not None) == masks[rank][j]
            if gradient is not None:
                name = f"gradient {j} of rank {rank} under {masks}"
                assert_near(name, gradient, exact[rank][j], torchs[rank][j], torch.float32)


def partly_frozen() -> nn.Sequential:
    """A model whose first batch norm evaluates while the others train."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)
    )
    nn.init.uniform_(model[1].running_mean)
    model[1].eval()
    return model.double()


def train_partly_frozen(rank: int, xs: list[Tensor]) -> dict[str, Tensor]:
    """A step of the converted model, with one layer to synchronize, then one with two."""
    model = convert_sync_batchnorm(partly_frozen())
    assert [module.training for module in model] == [True, False, True, True]
    before = collectives()
    model(xs[rank]).square().sum().backward()
    assert collectives() - before == 2
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    model(xs[rank]).square().sum().backward()
    assert collectives() - before == 6
    return state


def test_r9_a_layer_in_evaluation_stays_so_when_converted(ranks: RankPool, backend: str) -> None:
    """mmengine#1624."""
    xs = torch.randn(4, 3, 7, 7).double().split((1, 3))
    whole = partly_frozen()
    whole(torch.cat(xs))
    for state in ranks.run(2, train_partly_frozen, xs, backend=backend):
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def train_until_one_is_exhausted(rank: int, steps: list[int]) -> tuple[str, dict[str, Tensor]]:
    """The error that ends training, and the state it leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = DistributedDataParallel(convert_sync_batchnorm(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)

    def train() -> None:
        with model.join(throw_on_early_termination=True):
            for _ in range(steps[rank]):
                model(torch.randn(5, 3)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RuntimeError) as error:
        train()
    return str(error.value), model.module.state_dict()


@pytest.mark.parametrize("steps", [[2, 4], [4, 2], [3, 2, 4], [1, 1, 2]], ids=str)
def test_r10_uneven_iterations_end_training_on_all_ranks(ranks: RankPool, steps: list[int]) -> None:
    results = ranks.run(len(steps), train_until_one_is_exhausted, steps)
    for rank, (error, state) in enumerate(results):
        exhausted = f"Rank {rank} exhausted all inputs"
        assert error.startswith(
            exhausted
            if steps[rank] == min(steps)
            else "Detected at least one rank that exhausted inputs"
        )
        assert state["1.num_batches_tracked"] == min(steps)
        for name, value in state.items():
            assert torch.equal(value, results[0][1][name])
