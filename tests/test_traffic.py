"""Kernels read and write what the design says: forward 2 reads and 1 write, backward 4 and 1.

A residual is one more read in forward; with an activation, backward may have to write its gradient.
"""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from syncbn_triton.kernels.blocks import Blocks
from syncbn_triton.kernels.epilogue import ACTIVATIONS, PIECEWISE_LINEAR, Epilogue
from syncbn_triton.kernels.launchers import (
    backward_input,
    backward_reduce,
    channel_stats,
    normalize,
)
from triton.runtime.interpreter import InterpreterBuilder

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import traffic

INPUTS = {
    "contiguous": ((2, 4, 8, 16), torch.contiguous_format, Blocks(4, 32)),
    "contiguous, split": ((2, 4, 8, 16), torch.contiguous_format, Blocks(4, 32, split=3)),
    "ragged": ((3, 5, 7, 9), torch.contiguous_format, Blocks(4, 16)),
    "ragged, split": ((3, 5, 7, 9), torch.contiguous_format, Blocks(4, 16, split=4)),
    "channels-last": ((2, 16, 5, 5), torch.channels_last, Blocks(16, 16)),
    "channels-last, ragged, split": ((2, 24, 5, 5), torch.channels_last, Blocks(16, 16, split=3)),
    "flat": ((6, 16, 7, 7), torch.contiguous_format, Blocks(8, 49, flat=True)),
    "flat, split": ((6, 16, 7, 7), torch.contiguous_format, Blocks(8, 49, split=2, flat=True)),
    "flat, channels-last": ((2, 24, 5, 5), torch.channels_last, Blocks(24, 8, flat=True)),
    "2-D": ((70, 24), torch.contiguous_format, Blocks(16, 16)),
    "2-D, split": ((70, 24), torch.contiguous_format, Blocks(16, 16, split=4)),
    "chosen, contiguous": ((4, 3, 32, 32), torch.contiguous_format, None),
    "chosen, flat": ((32, 16, 7, 7), torch.contiguous_format, None),
    "chosen, channels-last": ((4, 24, 16, 16), torch.channels_last, None),
}

# Bytes of the widest value per channel.
WIDEST = 8
# Values per channel that move beside the full-size tensors: for each program that shares a channel
# or row of partials, and once.
OTHER = {
    # The merge: mean, M2, n. Normalize: two moments, n, weight, bias. Its first program: two
    # moments, n, the running statistics, the counter.
    "forward loads": (3 + 5, 6),
    # A row of partials: mean, M2, n. Packed: two moments, n. Saved: hi, lo, invstd, n. The running
    # statistics and the counter.
    "forward stores": (3, 3 + 4 + 3),
    # The reduction: hi, lo. The merge: two sums, and invstd once. The elementwise kernel: hi, lo,
    # invstd, n, two sums, weight.
    "backward loads": (2 + 2 + 7, 1),
    # A row of partials: two sums. Packed: two sums. Two gradients.
    "backward stores": (2, 2 + 2),
}


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    y = tl.load(x_ptr + offs, mask=offs < n, other=0.0) + tl.load(x_ptr)
    tl.store(y_ptr + offs, y, mask=offs < n - 1)


def test_active_lanes_count_while_counting() -> None:
    x, y = torch.ones(16, dtype=torch.float16), torch.ones(16)
    with traffic.count() as counted:
        copy_kernel[(2,)](x, y, 10, BLOCK=16)
    copy_kernel[(1,)](x, y, 10, BLOCK=16)
    assert counted.loads.bytes == counted.loads.of(x) == 2 * (10 + 1) * x.itemsize
    assert counted.stores.bytes == counted.stores.of(y) == 2 * 9 * y.itemsize
    assert counted.loads.of(y) == counted.stores.of(x) == 0
    assert counted.loads.of(x[:2]) == 2 * 3 * x.itemsize


def test_an_error_ends_counting() -> None:
    before = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    with pytest.raises(RuntimeError, match="inside"), traffic.count():
        raise RuntimeError("inside")
    after = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    assert after == before


def check_other(name: str, other: int, C: int, split: int) -> None:
    """What moves beside the full-size tensors is in proportion to channels and programs alone."""
    for_each, once = OTHER[name]
    assert 0 < other <= WIDEST * C * (for_each * split + once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("size", "memory_format", "blocks"), INPUTS.values(), ids=INPUTS)
def test_full_size_tensors_are_moved_once_by_each_kernel(
    size: tuple[int, ...],
    memory_format: torch.memory_format,
    blocks: Blocks | None,
    dtype: torch.dtype,
) -> None:
    x, dy = (torch.randn(size).to(dtype, memory_format=memory_format) for _ in range(2))
    C, unit = size[1], x.nbytes
    weight, bias, mean, var = torch.ones(4, C).unbind()
    with traffic.count() as forward:
        moments = channel_stats(x, blocks)
        arguments = (weight, bias, mean, var, torch.tensor(0), 0.1, 1e-5)
        y, stats = normalize(x, moments, *arguments, blocks)
    assert forward.loads.of(x) == 2 * unit
    assert forward.stores.of(y) == unit
    with traffic.count() as backward:
        sums, *_ = backward_reduce(x, dy, stats, torch.float32, torch.float32, blocks)
        dx = backward_input(x, dy, stats, weight, sums, blocks)
    assert backward.loads.of(x) == backward.loads.of(dy) == 2 * unit
    assert backward.stores.of(dx) == unit
    if blocks is not None:
        check_other("forward loads", forward.loads.bytes - 2 * unit, C, blocks.split)
        check_other("forward stores", forward.stores.bytes - unit, C, blocks.split)
        check_other("backward loads", backward.loads.bytes - 4 * unit, C, blocks.split)
        check_other("backward stores", backward.stores.bytes - unit, C, blocks.split)


# Values per channel that an activation's argument takes more: weight, bias and invstd in the
# reduction, bias in the elementwise kernel.
OTHER["backward loads, activation"] = (OTHER["backward loads"][0] + 4, OTHER["backward loads"][1])
FUSED_INPUTS = ("channels-last, ragged, split", "flat, split")


@pytest.mark.parametrize(
    ("name", "activation"), [*product(FUSED_INPUTS[1:], ACTIVATIONS), (FUSED_INPUTS[0], "gelu")]
)
def test_an_activation_moves_nothing_more(name: str, activation: str) -> None:
    size, memory_format, blocks = INPUTS[name]
    x, dy = (torch.randn(size).bfloat16().to(memory_format=memory_format) for _ in range(2))
    C, unit, epilogue = size[1], x.nbytes, Epilogue(activation)
    weight, bias, mean, var = torch.ones(4, C).unbind()
    with traffic.count() as forward:
        moments = channel_stats(x, blocks)
        arguments = (weight, bias, mean, var, torch.tensor(0), 0.1, 1e-5)
        y, stats = normalize(x, moments, *arguments, blocks, epilogue)
    assert forward.loads.of(x) == 2 * unit
    assert forward.stores.of(y) == unit
    check_other("forward loads", forward.loads.bytes - 2 * unit, C, blocks.split)
    check_other("forward stores", forward.stores.bytes - unit, C, blocks.split)
    with traffic.count() as backward:
        arguments = (torch.float32, torch.float32, blocks, weight, bias, epilogue)
        sums, *_ = backward_reduce(x, dy, stats, *arguments)
        dx = backward_input(x, dy, stats, weight, sums, blocks, bias, epilogue)
    assert backward.loads.of(x) == backward.loads.of(dy) == 2 * unit
    assert backward.stores.of(dx) == unit
    check_other("backward loads, activation", backward.loads.bytes - 4 * unit, C, blocks.split)
    check_other("backward stores", backward.stores.bytes - unit, C, blocks.split)


@pytest.mark.parametrize("needs_grad", [True, False], ids=["residual needs a gradient", ""])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("name", FUSED_INPUTS)
def test_a_residual_is_read_once_by_each_kernel_that_needs_it(
    name: str, activation: str | None, needs_grad: bool
) -> None:
    """And in place of it, after a piecewise linear activation, one byte per element."""
    size, memory_format, blocks = INPUTS[name]
    x, dy, residual = (
        torch.randn(size).bfloat16().to(memory_format=memory_format) for _ in range(3)
    )
    C, unit = size[1], x.nbytes
    mask = torch.empty_like(x, dtype=torch.uint8) if activation in PIECEWISE_LINEAR else None
    epilogue = Epilogue(activation, residual=residual, mask=mask)
    of_mask = 0 if mask is None else x.numel()
    weight, bias, mean, var = torch.ones(4, C).unbind()
    with traffic.count() as forward:
        moments = channel_stats(x, blocks)
        arguments = (weight, bias, mean, var, torch.tensor(0), 0.1, 1e-5)
        y, stats = normalize(x, moments, *arguments, blocks, epilogue)
    assert forward.loads.of(x) == 2 * unit
    assert forward.loads.of(residual) == forward.stores.of(y) == unit
    check_other("forward loads", forward.loads.bytes - 3 * unit, C, blocks.split)
    check_other("forward stores", forward.stores.bytes - unit - of_mask, C, blocks.split)
    if mask is not None:
        assert forward.stores.of(mask) == of_mask

    if activation is None or mask is not None:
        epilogue = epilogue._replace(residual=None)
    saved = residual if mask is None else mask
    # Of the reduction, and of the elementwise kernel, which begins with dz where that is stored.
    saved_loads = [0 if activation is None else saved.nbytes] * 2
    dz = None
    if activation is not None and needs_grad:
        dz = torch.empty_like(x)
        saved_loads[1] = 0
    with traffic.count() as reduction:
        arguments = (torch.float32, torch.float32, blocks, weight, bias, epilogue, dz)
        sums, *_ = backward_reduce(x, dy, stats, *arguments)
    assert reduction.loads.of(x) == reduction.loads.of(dy) == unit
    assert reduction.loads.of(saved) == saved_loads[0]
    with traffic.count() as elementwise:
        if dz is None:
            dx = backward_input(x, dy, stats, weight, sums, blocks, bias, epilogue)
        else:
            dx = backward_input(x, dz, stats, weight, sums, blocks)
    assert elementwise.loads.of(x) == elementwise.stores.of(dx) == unit
    assert elementwise.loads.of(dy if dz is None else dz) == unit
    assert elementwise.loads.of(saved) == saved_loads[1]
    if dz is not None:
        assert reduction.stores.of(dz) == unit
        assert elementwise.loads.of(dy) == 0
    loads = reduction.loads.bytes + elementwise.loads.bytes - 4 * unit - sum(saved_loads)
    stores = reduction.stores.bytes + elementwise.stores.bytes - unit * (1 if dz is None else 2)
    check_other("backward loads, activation", loads, C, blocks.split)
    check_other("backward stores", stores, C, blocks.split)
