"""The partial results of a split reduction, merged in a fixed order.

A reduction is split over several programs where one per channel group would leave the GPU idle.
Each then writes a row of partials, and these kernels add the rows up per channel, always in the
same order, so that a result does not depend on which program finished first.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .packing import store_gradients, store_moments
from .plan import Plan

# Elements of a [rows, channels] tile: 16 fp64 values a thread at 4 warps.
_TILE = 2048


@triton.jit
def merge_moments_kernel(
    partials_ptr,
    packed_ptr,
    C,
    rows,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_r = tl.arange(0, BLOCK_R)
    mask_c = offs_c < C
    mask_r = offs_r < rows
    mask = mask_r[:, None] & mask_c[None, :]
    row_ptrs = partials_ptr + offs_r.to(tl.int64) * (2 * C + 1)
    ptrs = row_ptrs[:, None] + offs_c[None, :]

    n_r = tl.load(row_ptrs + 2 * C, mask=mask_r, other=0.0)
    mean_r = tl.load(ptrs, mask=mask, other=0.0)
    m2_r = tl.load(ptrs + C, mask=mask, other=0.0)
    # Around the merged mean, so that nothing cancels (Chan et al. 1983, section 3).
    n = tl.sum(n_r, axis=0)
    mean = tl.sum(n_r[:, None] * mean_r, axis=0) / n
    d = tl.where(mask, mean_r - mean[None, :], 0.0)
    m2 = tl.sum(m2_r + n_r[:, None] * d * d, axis=0)
    store_moments(packed_ptr, offs_c, mask_c, C, mean, m2, n)


@triton.jit
def merge_gradients_kernel(
    partials_ptr,
    packed_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    stats_ptr,
    C,
    rows,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_r = tl.arange(0, BLOCK_R)
    mask_c = offs_c < C
    mask = (offs_r < rows)[:, None] & mask_c[None, :]
    ptrs = partials_ptr + offs_r.to(tl.int64)[:, None] * (2 * C) + offs_c[None, :]

    sum_dy = tl.sum(tl.load(ptrs, mask=mask, other=0.0), axis=0)
    sum_dy_xmu = tl.sum(tl.load(ptrs + C, mask=mask, other=0.0), axis=0)
    store_gradients(
        packed_ptr,
        grad_weight_ptr,
        grad_bias_ptr,
        stats_ptr,
        offs_c,
        mask_c,
        C,
        sum_dy,
        sum_dy_xmu,
        HAS_WEIGHT,
        HAS_BIAS,
    )


def _plan(kernel: Any, rows: int, C: int, device: torch.device, **constants: bool) -> Plan:
    block_r = triton.next_power_of_2(rows)
    block_c = min(triton.next_power_of_2(C), max(1, _TILE // block_r))
    blocks = {"BLOCK_R": block_r, "BLOCK_C": block_c}
    return Plan(kernel, triton.cdiv(C, block_c), device, (C, rows), blocks | constants)


def merge_moments(rows: int, C: int, device: torch.device) -> Plan:
    """Merges rows ``[mean | M2 | n]``, ``(rows, 2C + 1)`` fp64, into packed moments."""
    return _plan(merge_moments_kernel, rows, C, device)


def merge_gradients(
    rows: int, C: int, device: torch.device, HAS_WEIGHT: bool, HAS_BIAS: bool
) -> Plan:
    """Adds rows ``[sum dy | sum dy*(x - mean)]``, ``(rows, 2C)`` fp64, into ``(2C,)``.

    The gradients of weight and bias are stored too.
    """
    wanted = {"HAS_WEIGHT": HAS_WEIGHT, "HAS_BIAS": HAS_BIAS}
    return _plan(merge_gradients_kernel, rows, C, device, **wanted)
