"""The two sums of the gradient per channel, from one read of dy and x.

    sum dy        sum dy * (x - mean) = sum dy * (x - hi) - lo * sum dy

with dy the gradient of z where an activation follows (see `epilogue`), which is stored on the way
if the residual wants it.

``x - hi`` is exact near the mean (see `packing`). Lanes accumulate in fp32 (fp64 for fp64 input)
and are added up in fp64. The same two sums of this rank alone are the parameters' gradients::

    grad_weight = sum dy * (x - mean) * invstd        grad_bias = sum dy
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
from .merge import merge_gradients
from .packing import load_affine, load_invstd, load_mean, store_gradients
from .plan import Plan, planned
from .results import empty_gradients
from .tile import (
    channels_of_group,
    spread,
    sum_channels,
    tile_mask,
    tile_pointers,
    tile_start,
    tiles_of_kind,
    tiles_of_program,
    zeros,
)


@triton.jit
def backward_reduce_kernel(
    x_ptr,
    dy_ptr,
    dz_ptr,
    saved_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    out_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
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
    stride_dzn,
    stride_dzc,
    stride_dzs,
    stride_savedn,
    stride_savedc,
    stride_saveds,
    negative_slope: tl.float64,
    ACTIVATION: tl.constexpr,
    SAVED: tl.constexpr,
    HAS_DZ: tl.constexpr,
    ACC: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    group, begin, end = tiles_of_program(pid, C, tiles, tiles_per_program, TILE)
    offs_c, mask_c = channels_of_group(group, C, TILE)
    x_ptrs = tile_pointers(x_ptr, group, stride_xc, stride_xs, TILE)
    dy_ptrs = tile_pointers(dy_ptr, group, stride_dyc, stride_dys, TILE)
    hi, lo = load_mean(stats_ptr, offs_c, mask_c, C)
    hi_tile = spread(hi, TILE)
    if ACTIVATION is not None:
        saved_ptrs = x_ptrs
        if SAVED is not None:
            saved_ptrs = tile_pointers(saved_ptr, group, stride_savedc, stride_saveds, TILE)
        if HAS_DZ:
            dz_ptrs = tile_pointers(dz_ptr, group, stride_dzc, stride_dzs, TILE)
        invstd = load_invstd(stats_ptr, offs_c, mask_c, C)
        a = load_affine(weight_ptr, offs_c, mask_c, 1.0, HAS_WEIGHT, ACC) * invstd
        b = load_affine(bias_ptr, offs_c, mask_c, 0.0, HAS_BIAS, ACC) - lo * a
        a_tile, b_tile = spread(a, TILE), spread(b, TILE)

    sum_dy = zeros(ACC, TILE)
    sum_dy_xhi = zeros(ACC, TILE)
    for RAGGED in tl.static_range(0, 1 if TILE.EVEN_S else 2):
        first, last = tiles_of_kind(begin, end, full_tiles, RAGGED)
        for t in range(first, last):
            x_start = tile_start(t, tiles_per_row, stride_xn, stride_xs, TILE)
            dy_start = tile_start(t, tiles_per_row, stride_dyn, stride_dys, TILE)
            mask = tile_mask(t, group, C, S, tiles_per_row, RAGGED, TILE)
            x = tl.load(x_ptrs + x_start, mask=mask, other=0.0).to(ACC)
            # 0 in absent elements, where x - hi is finite: they add nothing.
            dy = tl.load(dy_ptrs + dy_start, mask=mask, other=0.0).to(ACC)
            d = x - hi_tile
            if ACTIVATION is not None:
                start = tile_start(t, tiles_per_row, stride_savedn, stride_saveds, TILE)
                z = load_argument(d * a_tile + b_tile, saved_ptrs + start, mask, SAVED)
                dy = backpropagate(dy, z, negative_slope, ACTIVATION)
                if HAS_DZ:
                    start = tile_start(t, tiles_per_row, stride_dzn, stride_dzs, TILE)
                    tl.store(dz_ptrs + start, dy.to(dz_ptr.dtype.element_ty), mask=mask)
            sum_dy += dy
            sum_dy_xhi += dy * d

    g1 = sum_channels(sum_dy, tl.float64, TILE)
    g2 = sum_channels(sum_dy_xhi, tl.float64, TILE) - lo.to(tl.float64) * g1
    if SPLIT:
        row_ptr = out_ptr + tl.cast(begin // tiles_per_program, tl.int64) * (2 * C)
        tl.store(row_ptr + offs_c, g1, mask=mask_c)
        tl.store(row_ptr + C + offs_c, g2, mask=mask_c)
    else:
        store_gradients(
            out_ptr,
            grad_weight_ptr,
            grad_bias_ptr,
            stats_ptr,
            offs_c,
            mask_c,
            C,
            g1,
            g2,
            HAS_WEIGHT,
            HAS_BIAS,
        )


@planned
def _plans(
    shape: torch.Size,
    x_strides: tuple[int, ...],
    dy_strides: tuple[int, ...],
    dz_strides: tuple[int, ...],
    saved_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    blocks: Blocks | None,
    wanted: tuple[bool, bool],
    **constants: Any,
) -> tuple[int, Plan, Plan]:
    """Rows of partial results, the plan that computes them, and the one that merges them."""
    v = view(shape, x_strides, dy_strides, dz_strides, saved_strides)
    cut = (blocks or choose_blocks("backward_reduce", v, dtype, device)).cut(v)
    merge = merge_gradients(cut.split, v.C, device, *wanted)
    constants |= {"HAS_WEIGHT": wanted[0], "HAS_BIAS": wanted[1], "SPLIT": cut.split > 1}
    reduce = Plan.over(backward_reduce_kernel, v, cut, dtype, device, **constants)
    return cut.split, reduce, merge


def backward_reduce(
    x: Tensor,
    dy: Tensor,
    stats: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    blocks: Blocks | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epilogue: Epilogue = NONE,
    dz: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Packs the two sums of this rank, and gives the gradients of weight and bias.

    Args:
        x: ``(N, C, *)``, as given to `normalize`.
        dy: Gradient of y, of x's shape, any strides.
        stats: ``(3C + 1,)``, from `normalize`.
        weight_dtype: dtype of the weight's gradient; None for a layer without a weight.
        bias_dtype: dtype of the bias's gradient; None for a layer without a bias.
        blocks: Block sizes; chosen for the shape if absent.
        weight: ``(C,)`` or None for 1. Needed with an activation.
        bias: ``(C,)`` or None for 0. Needed with an activation.
        epilogue: As given to `normalize`.
        dz: Of x's shape, dtype and memory format: becomes the gradient of z, with an activation.

    Returns:
        The sums, ``(2C,)`` fp64; and the gradients of weight and bias, ``(C,)``, or ``(0,)`` for a
        layer without one. Zeros if x is empty.
    """
    packed, grad_weight, grad_bias = empty_gradients(x, weight_dtype, bias_dtype)
    if x.numel() == 0:
        return packed.zero_(), grad_weight.zero_(), grad_bias.zero_()
    name, saved = epilogue.saved()
    rows, reduce, merge = _plans(
        x.shape,
        x.stride(),
        dy.stride(),
        (x if dz is None else dz).stride(),
        (x if saved is None else saved).stride(),
        x.dtype,
        x.device,
        blocks,
        (weight_dtype is not None, bias_dtype is not None),
        ACTIVATION=epilogue.activation,
        SAVED=name,
        HAS_DZ=dz is not None,
    )
    partials = packed if rows == 1 else packed.new_empty(rows, packed.numel())
    tiled, affine = (x, dy, dz, saved), (weight, bias)
    results = (partials, grad_weight, grad_bias)
    reduce.launch(*tiled, *affine, stats, *results, scalars=(epilogue.negative_slope,))
    if rows > 1:
        merge.launch(partials, packed, grad_weight, grad_bias, stats)
    return packed, grad_weight, grad_bias
