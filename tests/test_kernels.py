"""The Triton kernels against the oracle, interpreted, with block sizes that leave ragged tiles."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Layer, Step, assert_step
from syncbn_triton.kernels.blocks import Blocks
from syncbn_triton.kernels.launchers import (
    backward_input,
    backward_reduce,
    channel_stats,
    normalize,
)
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = {
    "contiguous": ((3, 5, 7, 9), torch.contiguous_format),
    "contiguous, full tiles": ((2, 4, 4, 8), torch.contiguous_format),
    "channels-last": ((3, 5, 7, 9), torch.channels_last),
    "channels-last 3-D": ((2, 3, 4, 5, 6), torch.channels_last_3d),
    "contiguous 3-D": ((2, 3, 4, 5, 6), torch.contiguous_format),
    "sequence": ((4, 6, 11), torch.contiguous_format),
    "2-D": ((37, 11), torch.contiguous_format),
    "one channel": ((3, 1, 5, 5), torch.contiguous_format),
    "one sample": ((1, 3, 6, 7), torch.contiguous_format),
}
# 4 channels and 16 positions leave more than one tile, and a ragged one, in most shapes.
BLOCKS = {"unsplit": Blocks(4, 16), "split": Blocks(4, 16, split=3)}


def make_layer(C: int, dtype: torch.dtype) -> Layer:
    """A layer away from its initial state."""
    return Layer(
        weight=torch.rand(C).to(dtype) + 0.5,
        bias=torch.randn(C).to(dtype),
        running_mean=torch.randn(C).to(dtype),
        running_var=torch.rand(C).to(dtype) + 0.5,
    )


def run_kernels(layer: Layer, x: Tensor, dy: Tensor, blocks: Blocks | None) -> tuple[Step, Tensor]:
    """One step through the four launchers, and the counter after it."""
    clone = {n: None if t is None else t.clone() for n, t in vars(layer).items() if n[:3] == "run"}
    counter = None if layer.running_mean is None else torch.tensor(0)
    moments = channel_stats(x, blocks)
    y, stats = normalize(
        x,
        moments,
        layer.weight,
        layer.bias,
        clone["running_mean"],
        clone["running_var"],
        counter,
        layer.momentum,
        layer.eps,
        blocks,
    )
    dtypes = [None if t is None else t.dtype for t in (layer.weight, layer.bias)]
    sums, grad_weight, grad_bias = backward_reduce(x, dy, stats, *dtypes, blocks)
    dx = backward_input(x, dy, stats, layer.weight, sums, blocks)
    grads = (
        grad_weight if layer.weight is not None else None,
        grad_bias if layer.bias is not None else None,
    )
    return Step(y, dx, *grads, **clone), counter


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step_matches_the_oracle(dtype: torch.dtype, shape: str, blocks: str) -> None:
    size, memory_format = SHAPES[shape]
    x = torch.randn(size).to(dtype).contiguous(memory_format=memory_format)
    dy = torch.randn(size).to(dtype).contiguous(memory_format=memory_format)
    layer = make_layer(size[1], dtype)
    step, counter = run_kernels(layer, x, dy, BLOCKS[blocks])
    assert_step(step, layer, x, dy)
    assert counter == 1
    for result in (step.y, step.dx):
        assert result.dtype == dtype
        assert result.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("size", [(2, 3, 300), (300, 20), (2, 70, 3, 3), (2, 3, 2100)], ids=str)
def test_heuristic_blocks_match_the_oracle(size: tuple[int, ...]) -> None:
    x, dy = torch.randn(size), torch.randn(size)
    layer = make_layer(size[1], torch.float32)
    step, _ = run_kernels(layer, x, dy, None)
    assert_step(step, layer, x, dy)


@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_without_weight_or_bias(has_weight: bool, has_bias: bool, blocks: str) -> None:
    x, dy = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
    layer = make_layer(5, torch.float32)
    layer.weight = layer.weight if has_weight else None
    layer.bias = layer.bias if has_bias else None
    step, _ = run_kernels(layer, x, dy, BLOCKS[blocks])
    assert_step(step, layer, x, dy)


def test_without_running_statistics() -> None:
    x, dy = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
    layer = make_layer(5, torch.float32)
    layer.running_mean = layer.running_var = None
    step, counter = run_kernels(layer, x, dy, Blocks(4, 16))
    assert_step(step, layer, x, dy)
    assert counter is None


def test_cumulative_average_of_more_channels_than_one_block_tracks() -> None:
    x, dy = torch.randn(3, 1030), torch.randn(3, 1030)
    layer = make_layer(1030, torch.float32)
    layer.momentum = None
    step, counter = run_kernels(layer, x, dy, Blocks(256, 4))
    assert_step(step, layer, x, dy)
    assert counter == 1


@pytest.mark.parametrize("blocks", BLOCKS)
def test_x_and_dy_in_different_formats(blocks: str) -> None:
    """Nothing is copied: one launch reads both by their own strides."""
    x = torch.randn(3, 5, 7, 9)
    for x_format, dy_format in [
        (torch.contiguous_format, torch.channels_last),
        (torch.channels_last, torch.contiguous_format),
    ]:
        layer = make_layer(5, torch.float32)
        x, dy = x.contiguous(memory_format=x_format), torch.randn_like(x, memory_format=dy_format)
        step, _ = run_kernels(layer, x, dy, BLOCKS[blocks])
        assert_step(step, layer, x, dy)
        assert step.dx.is_contiguous(memory_format=x_format)


def test_split_and_unsplit_statistics_agree() -> None:
    """Merging loses nothing even where the mean dwarfs the deviation."""
    x = torch.randn(4, 3, 50) + 1e4
    whole, split = channel_stats(x, Blocks(4, 16)), channel_stats(x, Blocks(4, 16, split=5))
    count = 4 * 50
    variances = [p[3:6] / count - (p[:3] / count).square() for p in (whole, split)]
    torch.testing.assert_close(*variances, rtol=1e-6, atol=0)
    assert whole[-1] == split[-1] == count


def test_an_empty_batch_packs_zeros() -> None:
    assert channel_stats(torch.empty(0, 3, 4)).tolist() == [0.0] * 7


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An allocation that comes full of NaN."""

    def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        result = allocate(*args, **kwargs)
        return result.fill_(math.nan) if result.is_floating_point() else result

    return allocate_poisoned


def test_nothing_is_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result is allocated full of NaN here, and none is left."""
    for owner, name in ((torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    for blocks in BLOCKS.values():
        x, dy = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
        layer = make_layer(5, torch.float32)
        step, _ = run_kernels(layer, x, dy, blocks)
        assert_step(step, layer, x, dy)
