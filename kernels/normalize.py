"""The normalized output, from one read of x and one write of y.

With the mean in two floats, ``hi`` and ``lo`` (see `packing`)::

    y = (x - hi) * a + b        a = weight * invstd        b = bias - lo * a

and what follows in the same pass (see `epilogue`).

Every program finishes the moments of its own channels. The first also saves the statistics that
backward needs and updates the running ones, for all channels, so that the counter has one reader
and one writer. Tiles are walked from the last to the first: what `channel_stats` read last is what
the cache still holds.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import activate, mask_of
from .blocks import Blocks, choose_blocks
from .epilogue import NONE, Epilogue
from .layout import view
from .packing import (
    load_affine,
    load_moments,
    narrow,
    reciprocal,
    standardize,
    store_statistics,
    widen,
)
from .plan import Plan, planned
from .results import empty_like_input, empty_statistics
from .tile import (
    channels_of_group,
    spread,
    tile_mask,
    tile_pointers,
    tile_start,
    tiles_of_kind,
    tiles_of_program,
)

# Channels the first program finishes at a time.
_BLOCK_TRACK = 512


@triton.jit
def update_running(ptr, offs_c, mask_c, value, factor):
    """``(1 - factor) * running + factor * value`` in fp64, stored in the buffer's dtype."""
    running = widen(tl.load(ptr + offs_c, mask=mask_c, other=0.0), tl.float64)
    running = (1.0 - factor) * running + factor * value
    tl.store(ptr + offs_c, narrow(running, ptr.dtype.element_ty), mask=mask_c)


@triton.jit
def save_and_track(
    packed_ptr,
    stats_ptr,
    running_mean_ptr,
    running_var_ptr,
    num_batches_ptr,
    C,
    momentum: tl.float64,
    eps: tl.float64,
    ACC: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    HAS_COUNTER: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    count = tl.load(packed_ptr + 2 * C)
    # 0 for a batch that is empty on every rank: it changes nothing.
    seen = tl.minimum(count, 1.0)
    factor = seen * momentum
    if HAS_COUNTER:
        num_batches = tl.load(num_batches_ptr)
        if CUMULATIVE:
            factor = seen * reciprocal((num_batches + 1).to(tl.float64))
        tl.store(num_batches_ptr, num_batches + seen.to(tl.int64))
    for c in range(0, C, BLOCK):
        offs_c = c + tl.arange(0, BLOCK)
        mask_c = offs_c < C
        mean, var, _ = load_moments(packed_ptr, offs_c, mask_c, C)
        hi, lo, invstd = standardize(mean, var, eps, ACC)
        store_statistics(stats_ptr, offs_c, mask_c, C, hi, lo, invstd, count)
        if HAS_RUNNING:
            unbiased = var * (count * reciprocal(tl.maximum(count - 1.0, 1.0)))
            update_running(running_mean_ptr, offs_c, mask_c, mean, factor)
            update_running(running_var_ptr, offs_c, mask_c, unbiased, factor)


@triton.jit
def normalize_kernel(
    x_ptr,
    y_ptr,
    residual_ptr,
    mask_ptr,
    packed_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    running_mean_ptr,
    running_var_ptr,
    num_batches_ptr,
    C,
    S,
    tiles,
    tiles_per_row,
    tiles_per_program,
    full_tiles,
    stride_xn,
    stride_xc,
    stride_xs,
    stride_yn,
    stride_yc,
    stride_ys,
    stride_rn,
    stride_rc,
    stride_rs,
    momentum: tl.float64,
    eps: tl.float64,
    negative_slope: tl.float64,
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ACC: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RUNNING: tl.constexpr,
    HAS_COUNTER: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    BLOCK_TRACK: tl.constexpr,
    TILE: tl.constexpr,
):
    if tl.program_id(0) == 0:
        save_and_track(
            packed_ptr,
            stats_ptr,
            running_mean_ptr,
            running_var_ptr,
            num_batches_ptr,
            C,
            momentum,
            eps,
            ACC,
            HAS_RUNNING,
            HAS_COUNTER,
            CUMULATIVE,
            BLOCK_TRACK,
        )
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    group, begin, end = tiles_of_program(pid, C, tiles, tiles_per_program, TILE)
    offs_c, mask_c = channels_of_group(group, C, TILE)
    x_ptrs = tile_pointers(x_ptr, group, stride_xc, stride_xs, TILE)
    y_ptrs = tile_pointers(y_ptr, group, stride_yc, stride_ys, TILE)
    if HAS_RESIDUAL:
        residual_ptrs = tile_pointers(residual_ptr, group, stride_rc, stride_rs, TILE)
    if HAS_MASK:
        mask_ptrs = tile_pointers(mask_ptr, group, stride_yc, stride_ys, TILE)

    mean, var, _ = load_moments(packed_ptr, offs_c, mask_c, C)
    hi, lo, invstd = standardize(mean, var, eps, ACC)
    a = load_affine(weight_ptr, offs_c, mask_c, 1.0, HAS_WEIGHT, ACC) * invstd
    b = load_affine(bias_ptr, offs_c, mask_c, 0.0, HAS_BIAS, ACC) - lo * a
    hi, a, b = spread(hi, TILE), spread(a, TILE), spread(b, TILE)

    for RAGGED in tl.static_range(0, 1 if TILE.EVEN_S else 2):
        first, last = tiles_of_kind(begin, end, full_tiles, RAGGED)
        for i in range(first, last):
            t = first + last - 1 - i
            x_start = tile_start(t, tiles_per_row, stride_xn, stride_xs, TILE)
            y_start = tile_start(t, tiles_per_row, stride_yn, stride_ys, TILE)
            mask = tile_mask(t, group, C, S, tiles_per_row, RAGGED, TILE)
            x = tl.load(x_ptrs + x_start, mask=mask, other=0.0, eviction_policy="evict_first")
            z = (x.to(ACC) - hi) * a + b
            if HAS_RESIDUAL:
                start = tile_start(t, tiles_per_row, stride_rn, stride_rs, TILE)
                residual = tl.load(
                    residual_ptrs + start, mask=mask, other=0.0, eviction_policy="evict_first"
                )
                z += residual.to(ACC)
            if HAS_MASK:
                tl.store(mask_ptrs + y_start, mask_of(z, ACTIVATION), mask=mask)
            y = activate(z, negative_slope, ACTIVATION)
            tl.store(y_ptrs + y_start, y.to(y_ptr.dtype.element_ty), mask=mask)


@planned
def _plan(
    shape: torch.Size,
    x_strides: tuple[int, ...],
    y_strides: tuple[int, ...],
    residual_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    blocks: Blocks | None,
    **constants: Any,
) -> Plan:
    v = view(shape, x_strides, y_strides, residual_strides)
    cut = (blocks or choose_blocks("normalize", v, dtype, device)).cut(v)
    block = min(_BLOCK_TRACK, triton.next_power_of_2(v.C))
    return Plan.over(normalize_kernel, v, cut, dtype, device, BLOCK_TRACK=block, **constants)


def normalize(
    x: Tensor,
    packed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    blocks: Blocks | None = None,
    epilogue: Epilogue = NONE,
) -> tuple[Tensor, Tensor]:
    """Normalizes x by packed moments, and updates the running statistics in place.

    Args:
        x: ``(N, C, *)``, floating point, any strides; N may be 0.
        packed: ``(2C + 1,)``, fp64: the moments summed over ranks.
        weight: ``(C,)`` or None for 1.
        bias: ``(C,)`` or None for 0.
        running_mean: ``(C,)`` or None; becomes ``(1 - f) * running_mean + f * mean``.
        running_var: ``(C,)``, None exactly where running_mean is; takes the unbiased variance.
        num_batches_tracked: ``()``, int64, or None; grows by 1 unless all ranks are empty.
        momentum: ``f`` above, or None for ``1 / num_batches_tracked``.
        eps: Added to the variance.
        blocks: Block sizes; chosen for the shape if absent.
        epilogue: What follows; its mask is written.

    Returns:
        y, of x's shape, dtype and memory format; and the statistics, ``(3C + 1,)``, for backward.
    """
    y, stats = empty_like_input(x), empty_statistics(x)
    residual, mask = epilogue.residual, epilogue.mask
    plan = _plan(
        x.shape,
        x.stride(),
        y.stride(),
        (x if residual is None else residual).stride(),
        x.dtype,
        x.device,
        blocks,
        ACTIVATION=epilogue.activation,
        HAS_RESIDUAL=residual is not None,
        HAS_MASK=mask is not None,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
        HAS_RUNNING=running_mean is not None,
        HAS_COUNTER=num_batches_tracked is not None,
        CUMULATIVE=momentum is None,
    )
    tracked = (running_mean, running_var, num_batches_tracked)
    scalars = (momentum or 0.0, eps, epilogue.negative_slope)
    plan.launch(x, y, residual, mask, packed, weight, bias, stats, *tracked, scalars=scalars)
    return y, stats
