"""The packed tensors that travel between ranks, and the per-channel values computed from them.

``moments``, fp64, length ``2C + 1``, summed over ranks in forward::

    [ n * mean  |  M2 + n * mean^2  |  n ]        n = this rank's values per channel

``gradients``, fp64, length ``2C``, summed over ranks in backward::

    [ sum dy  |  sum dy * (x - mean) ]

Both depend on C alone and have one dtype, so ranks with uneven, empty or differently tuned batches
always match. In fp64 the cancellation ``p1 / n - mean^2`` costs a relative error of the variance of
about ``2^-52 * (mean / std)^2``: 2e-8 at mean/std = 1e4, 2e-4 at 1e6.

``statistics``, fp32 (fp64 for fp64 input), length ``3C + 1``, saved for backward::

    [ hi  |  lo  |  invstd  |  n ]                mean = hi + lo, n over all ranks

The mean is two floats because ``x - hi`` is exact for x near the mean, where a mean rounded to one
float is off by up to ``2^-25 * |mean|``; ``lo`` folds into per-channel constants.
"""

import triton
import triton.language as tl


@triton.jit
def widen(x, dtype: tl.constexpr):
    """Values in a wider dtype, by way of fp32: the interpreter cannot take bf16 to fp64."""
    return x if x.dtype == dtype else x.to(tl.float32).to(dtype)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp64 values in the dtype of a parameter or buffer, by way of fp32 as in `widen`."""
    return x if dtype == tl.float64 else x.to(tl.float32).to(dtype)


@triton.jit
def reciprocal(n):
    """``1 / n`` in fp64, to a unit in the last place, for n that fits fp32's range.

    Two Newton steps from an fp32 quotient: division in fp64 is a subroutine, whose call spills.
    """
    r = (1.0 / n.to(tl.float32)).to(tl.float64)
    r += r * (1.0 - n * r)
    r += r * (1.0 - n * r)
    return r


@triton.jit
def store_moments(packed_ptr, offs_c, mask_c, C, mean, m2, count):
    """Packs the moments of this rank; mean and m2 are fp64 per channel, count is a scalar."""
    n = tl.cast(count, tl.float64)
    tl.store(packed_ptr + offs_c, n * mean, mask=mask_c)
    tl.store(packed_ptr + C + offs_c, m2 + n * mean * mean, mask=mask_c)
    tl.store(packed_ptr + 2 * C + offs_c, n, mask=mask_c & (offs_c == 0))


@triton.jit
def load_moments(packed_ptr, offs_c, mask_c, C):
    """Mean and biased variance over all ranks in fp64, and their count; zeros where it is 0."""
    count = tl.load(packed_ptr + 2 * C)
    inv_count = reciprocal(tl.maximum(count, 1.0))
    mean = tl.load(packed_ptr + offs_c, mask=mask_c, other=0.0) * inv_count
    mean_sq = tl.load(packed_ptr + C + offs_c, mask=mask_c, other=0.0) * inv_count
    var = mean_sq - mean * mean
    # Not tl.maximum, which would turn the NaN of a NaN input into a variance of 0.
    return mean, tl.where(var < 0.0, 0.0, var), count


@triton.jit
def standardize(mean, var, eps, ACC: tl.constexpr):
    """(hi, lo, invstd) of a mean and a variance in fp64, rounded correctly to ACC."""
    hi = mean.to(ACC)
    lo = (mean - hi.to(tl.float64)).to(ACC)
    # Added in fp64, where eps is not lost beside a large variance nor the variance beside eps.
    shifted = var + eps
    if ACC == tl.float64:
        invstd = 1.0 / tl.sqrt(shifted)
    else:
        # As in `reciprocal`; not below fp32's smallest normal number, of which it knows no root.
        root = tl.rsqrt(tl.maximum(shifted.to(tl.float32), 1.1754944e-38)).to(tl.float64)
        invstd = (root + 0.5 * root * (1.0 - shifted * root * root)).to(tl.float32)
    return hi, lo, invstd


@triton.jit
def store_statistics(stats_ptr, offs_c, mask_c, C, hi, lo, invstd, count):
    tl.store(stats_ptr + offs_c, hi, mask=mask_c)
    tl.store(stats_ptr + C + offs_c, lo, mask=mask_c)
    tl.store(stats_ptr + 2 * C + offs_c, invstd, mask=mask_c)
    tl.store(stats_ptr + 3 * C + offs_c, count.to(hi.dtype), mask=mask_c & (offs_c == 0))


@triton.jit
def load_mean(stats_ptr, offs_c, mask_c, C):
    hi = tl.load(stats_ptr + offs_c, mask=mask_c, other=0.0)
    lo = tl.load(stats_ptr + C + offs_c, mask=mask_c, other=0.0)
    return hi, lo


@triton.jit
def load_invstd(stats_ptr, offs_c, mask_c, C):
    return tl.load(stats_ptr + 2 * C + offs_c, mask=mask_c, other=0.0)


@triton.jit
def load_count(stats_ptr, C):
    return tl.load(stats_ptr + 3 * C)


@triton.jit
def load_affine(ptr, offs_c, mask_c, DEFAULT: tl.constexpr, HAS: tl.constexpr, ACC: tl.constexpr):
    """A weight or bias in ACC, DEFAULT where the layer has none."""
    if HAS:
        return widen(tl.load(ptr + offs_c, mask=mask_c, other=DEFAULT), ACC)
    else:
        return tl.full(offs_c.shape, DEFAULT, ACC)


@triton.jit
def store_gradients(
    packed_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    stats_ptr,
    offs_c,
    mask_c,
    C,
    sum_dy,
    sum_dy_xmu,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Packs the two sums of this rank (fp64), and stores the parameters' gradients they give."""
    tl.store(packed_ptr + offs_c, sum_dy, mask=mask_c)
    tl.store(packed_ptr + C + offs_c, sum_dy_xmu, mask=mask_c)
    if HAS_WEIGHT:
        invstd = load_invstd(stats_ptr, offs_c, mask_c, C).to(tl.float64)
        grad_weight = narrow(sum_dy_xmu * invstd, grad_weight_ptr.dtype.element_ty)
        tl.store(grad_weight_ptr + offs_c, grad_weight, mask=mask_c)
    if HAS_BIAS:
        grad_bias = narrow(sum_dy, grad_bias_ptr.dtype.element_ty)
        tl.store(grad_bias_ptr + offs_c, grad_bias, mask=mask_c)
