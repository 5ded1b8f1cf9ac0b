"""Under FSDP2 ranks train as one process does, with norms sharded, apart or whole, and in bf16."""

import copy
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from training import (
    MAX_NORM,
    STEPS,
    TIMEOUT,
    State,
    assert_each_is,
    batches,
    converted,
    net,
    sharded,
    share,
    state,
    train,
)

from syncbn_triton import SyncBatchNorm, convert_sync_batchnorm


def train_with_fsdp(
    rank: int, layout: str, max_norm: float | None
) -> tuple[State, list[float], list[bool]]:
    model = sharded(converted(), layout)
    norms = train(model, share(rank, batches()), max_norm=max_norm)
    layer: Any = model.blocks[0][1]
    assert isinstance(layer, SyncBatchNorm)
    return state(model), norms, [isinstance(t, DTensor) for t in (layer.weight, layer.running_mean)]


@pytest.mark.parametrize("layout", ["one unit", "by block", "norms apart", "norms whole"])
def test_fsdp(ranks: RankPool, layout: str) -> None:
    results = ranks.run(2, train_with_fsdp, layout, None, timeout=TIMEOUT)
    model = net()
    train(model, batches())
    assert_each_is((result for result, _, _ in results), state(model))
    is_sharded = layout != "norms whole"
    assert all(flags == [is_sharded, False] for _, _, flags in results)


def test_fsdp_with_gradient_clipping(ranks: RankPool) -> None:
    results = ranks.run(2, train_with_fsdp, "by block", MAX_NORM, timeout=TIMEOUT)
    model = net()
    right = train(model, batches(), max_norm=MAX_NORM)
    for actual, norms, _ in results:
        assert_each_is([actual], state(model))
        assert norms == pytest.approx(right, rel=1e-12)


class InFp32(nn.BatchNorm2d):
    """torch's layer on half-precision input, whose running statistics stay as they are."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        self.num_batches_tracked += 1
        running = (self.running_mean, self.running_var)
        y = nn.functional.batch_norm(input.float(), *running, weight, bias, True, self.momentum)
        return y.to(input.dtype)


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def slow_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Steps too small for the roundings of one to be magnified in the next."""
    return torch.optim.SGD(model.parameters(), lr=0.02)


def train_in_bf16(rank: int, layout: str, model: nn.Module, world_size: int) -> State:
    steps = batches(dtype=torch.float32)
    model = sharded(model, layout, BF16)
    train(model, share(rank, steps) if world_size > 1 else steps, slow_sgd(model))
    for layer in model.modules():
        if isinstance(layer, SyncBatchNorm):
            assert layer.running_var.dtype == torch.float32
    return state(model)


def distance(actual: State, exact: State, parameters: bool) -> float:
    """Between two states, of what is learned or of the running statistics."""
    names = [n for n, t in exact.items() if t.dim() and ("running" in n) != parameters]
    return torch.cat([(actual[n].double() - exact[n]).flatten() for n in names]).norm().item()


# Distance of 2 ranks from the float64 run over that of torch's layer in one process. Measured: 0.61
# to 1.15 over 10 runs from other data, on a CPU with torch 2.13; unsynchronized layers: above 20.
FACTOR = 1.5


@pytest.mark.parametrize("layout", ["by block", "norms apart"])
def test_fsdp_with_bf16_parameters(ranks: RankPool, layout: str) -> None:
    """As near to float64 as torch's layer in one process under the same policy."""
    single, exact = net(torch.float32), net()
    train(exact, batches(), slow_sgd(exact))
    alone = copy.deepcopy(single)
    for child in alone.blocks:
        child[1].__class__ = InFp32
    (right,) = ranks.run(1, train_in_bf16, layout, alone, 1, timeout=TIMEOUT)
    ours = convert_sync_batchnorm(single)
    results = ranks.run(2, train_in_bf16, layout, ours, 2, timeout=TIMEOUT)
    for result in results:
        for parameters in (True, False):
            allowed = FACTOR * distance(right, state(exact), parameters)
            assert distance(result, state(exact), parameters) <= allowed
        assert result["blocks.0.1.num_batches_tracked"] == STEPS
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
