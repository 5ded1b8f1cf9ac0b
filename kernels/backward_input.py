"""The gradient of the input, from one read of dy and x and one write of dx.

    dx = dy * A + (x - hi) * B + D

    A = weight * invstd
    B = -A * invstd^2 * sum dy * (x - mean) / M
    D = -A * sum dy / M - lo * B

with dy the gradient of z where an activation follows (see `epilogue`), and with the sums and the
count M over all ranks. Tiles are walked from the last to the first: what `backward_reduce` read
last is what the cache still holds.

Source: Ioffe and Szegedy, "Batch Normalization", 2015, section 3, with the derivatives collected
per channel.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import backpropagate, load_argument
from .blocks import Blocks, choose_blocks
from .epilogue import NONE, Epilogue
from .layout import view
from .packing import load_affine, load_count, load_invstd, load_mean, reciprocal
from .plan import Plan, planned
from .results import empty_like_input
from .tile import (
    channels_of_group,
    spread,
    tile_mask,
    tile_pointers,
    tile_start,
    tiles_of_kind,
    tiles_of_program,
)


@triton.jit
def backward_input_kernel(
    x_ptr,
    dy_ptr,
    dx_ptr,
    saved_ptr,
    packed_ptr,
    stats_ptr,
    weight_ptr,
    bias_ptr,
    C,
    S,
    tiles,
    tiles_per_row,
    tiles_per_program,
    full_tiles,
    stride_xn,
    stride_xc,
    stride_xs,
    stride_dyn,
    stride_dyc,
    stride_dys,
    stride_dxn,
    stride_dxc,
    stride_dxs,
    stride_savedn,
    stride_savedc,
    stride_saveds,
    negative_slope: tl.float64,
    ACTIVATION: tl.constexpr,
    SAVED: tl.constexpr,
    ACC: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    group, begin, end = tiles_of_program(pid, C, tiles, tiles_per_program, TILE)
    offs_c, mask_c = channels_of_group(group, C, TILE)
    x_ptrs = tile_pointers(x_ptr, group, stride_xc, stride_xs, TILE)
    dy_ptrs = tile_pointers(dy_ptr, group, stride_dyc, stride_dys, TILE)
    dx_ptrs = tile_pointers(dx_ptr, group, stride_dxc, stride_dxs, TILE)

    hi, lo = load_mean(stats_ptr, offs_c, mask_c, C)
    invstd = load_invstd(stats_ptr, offs_c, mask_c, C)
    inv_count = reciprocal(load_count(stats_ptr, C).to(tl.float64))
    mean_dy = (tl.load(packed_ptr + offs_c, mask=mask_c, other=0.0) * inv_count).to(ACC)
    mean_dy_xmu = (tl.load(packed_ptr + C + offs_c, mask=mask_c, other=0.0) * inv_count).to(ACC)
    a = load_affine(weight_ptr, offs_c, mask_c, 1.0, HAS_WEIGHT, ACC) * invstd
    b = -a * invstd * invstd * mean_dy_xmu
    d = -a * mean_dy - lo * b
    if ACTIVATION is not None:
        saved_ptrs = x_ptrs
        if SAVED is not None:
            saved_ptrs = tile_pointers(saved_ptr, group, stride_savedc, stride_saveds, TILE)
        shift = load_affine(bias_ptr, offs_c, mask_c, 0.0, HAS_BIAS, ACC) - lo * a
        shift = spread(shift, TILE)
    hi, a, b, d = spread(hi, TILE), spread(a, TILE), spread(b, TILE), spread(d, TILE)

    for RAGGED in tl.static_range(0, 1 if TILE.EVEN_S else 2):
        first, last = tiles_of_kind(begin, end, full_tiles, RAGGED)
        for i in range(first, last):
            t = first + last - 1 - i
            x_start = tile_start(t, tiles_per_row, stride_xn, stride_xs, TILE)
            dy_start = tile_start(t, tiles_per_row, stride_dyn, stride_dys, TILE)
            dx_start = tile_start(t, tiles_per_row, stride_dxn, stride_dxs, TILE)
            mask = tile_mask(t, group, C, S, tiles_per_row, RAGGED, TILE)
            x = tl.load(x_ptrs + x_start, mask=mask, other=0.0, eviction_policy="evict_first")
            dy = tl.load(dy_ptrs + dy_start, mask=mask, other=0.0, eviction_policy="evict_first")
            dy, x = dy.to(ACC), x.to(ACC) - hi
            if ACTIVATION is not None:
                start = tile_start(t, tiles_per_row, stride_savedn, stride_saveds, TILE)
                z = load_argument(x * a + shift, saved_ptrs + start, mask, SAVED)
                dy = backpropagate(dy, z, negative_slope, ACTIVATION)
            dx = dy * a + x * b + d
            tl.store(dx_ptrs + dx_start, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@planned
def _plan(
    shape: torch.Size,
    x_strides: tuple[int, ...],
    dy_strides: tuple[int, ...],
    dx_strides: tuple[int, ...],
    saved_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    blocks: Blocks | None,
    **constants: Any,
) -> Plan:
    v = view(shape, x_strides, dy_strides, dx_strides, saved_strides)
    cut = (blocks or choose_blocks("backward_input", v, dtype, device)).cut(v)
    return Plan.over(backward_input_kernel, v, cut, dtype, device, **constants)


def backward_input(
    x: Tensor,
    dy: Tensor,
    stats: Tensor,
    weight: Tensor | None,
    packed: Tensor,
    blocks: Blocks | None = None,
    bias: Tensor | None = None,
    epilogue: Epilogue = NONE,
) -> Tensor:
    """The gradient of x.

    Args:
        x: ``(N, C, *)``, as given to `normalize`.
        dy: Gradient of y, of x's shape, any strides.
        stats: ``(3C + 1,)``, from `normalize`.
        weight: ``(C,)`` or None for 1.
        packed: ``(2C,)``, fp64: the sums of `backward_reduce`, summed over ranks.
        blocks: Block sizes; chosen for the shape if absent.
        bias: ``(C,)`` or None for 0. Needed with an activation.
        epilogue: As given to `normalize`.

    Returns:
        dx, of x's shape, dtype and memory format.
    """
    dx = empty_like_input(x)
    if x.numel() == 0:
        return dx
    name, saved = epilogue.saved()
    plan = _plan(
        x.shape,
        x.stride(),
        dy.stride(),
        dx.stride(),
        (x if saved is None else saved).stride(),
        x.dtype,
        x.device,
        blocks,
        ACTIVATION=epilogue.activation,
        SAVED=name,
        HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None,
    )
    scalars = (epilogue.negative_slope,)
    plan.launch(x, dy, dx, saved, packed, stats, weight, bias, scalars=scalars)
    return dx
