"""Activations and their derivatives on tiles, as torch defines them, also at kinks and for NaN."""

import triton
import triton.language as tl


@triton.jit
def activate(z, negative_slope, ACTIVATION: tl.constexpr):
    """``ACTIVATION(z)``, in z's dtype; z itself for None."""
    if ACTIVATION == "relu":
        return tl.where(z <= 0.0, 0.0, z)
    elif ACTIVATION == "leaky_relu":
        return tl.where(z > 0.0, z, z * tl.full((), negative_slope, z.dtype))
    elif ACTIVATION == "silu":
        s, _ = _sigmoid(z)
        return z * s
    elif ACTIVATION == "gelu":
        cdf, _ = _normal(z)
        return z * cdf
    elif ACTIVATION == "hardswish":
        return z * _ramp(z)
    else:
        return z


@triton.jit
def backpropagate(dy, z, negative_slope, ACTIVATION: tl.constexpr):
    """``dy * ACTIVATION'(z)``; of a piecewise linear one, z counts by its sign alone."""
    if ACTIVATION == "relu":
        # Not a product, which would be NaN for an infinite dy.
        return tl.where(z <= 0.0, 0.0, dy)
    elif ACTIVATION == "leaky_relu":
        return tl.where(z > 0.0, dy, dy * tl.full((), negative_slope, dy.dtype))
    elif ACTIVATION == "silu":
        s, rest = _sigmoid(z)
        return dy * (s + z * s * rest)
    elif ACTIVATION == "gelu":
        cdf, density = _normal(z)
        return dy * (cdf + z * density)
    elif ACTIVATION == "hardswish":
        inside = tl.where(z >= 3.0, 1.0, z * 0.3333333333333333 + 0.5)
        return tl.where(z <= -3.0, 0.0, dy * inside)
    else:
        return dy


@triton.jit
def mask_of(z, ACTIVATION: tl.constexpr):
    """The sign of z as `backpropagate` asks for it: 1 or 0, which of NaN is torch's choice."""
    if ACTIVATION == "relu":
        return tl.where(z <= 0.0, 0, 1).to(tl.uint8)
    else:
        return tl.where(z > 0.0, 1, 0).to(tl.uint8)


@triton.jit
def load_argument(z, saved_ptrs, mask, SAVED: tl.constexpr):
    """The activation's argument, from what forward saved: a residual, a mask, or nothing."""
    if SAVED == "mask":
        return tl.load(saved_ptrs, mask=mask, other=0).to(z.dtype)
    elif SAVED == "residual":
        return z + tl.load(saved_ptrs, mask=mask, other=0.0).to(z.dtype)
    else:
        return z


@triton.jit
def _exp(z):
    """In fp32 as one instruction and a product, which flushes what is subnormal."""
    return tl.exp(z) if z.dtype == tl.float64 else tl.exp2(z * 1.4426950408889634)


@triton.jit
def _reciprocal(n):
    """``1 / n`` for n of 1 and more, in fp32 to 4 units in the last place.

    A division takes eight instructions, most of them for the ends of fp32's range.
    """
    if n.dtype == tl.float64:
        return 1.0 / n
    else:
        root = tl.rsqrt(n)
        return root * root


@triton.jit
def _sigmoid(z):
    """``1 / (1 + exp(-z))`` and what it lacks to 1, neither by a subtraction."""
    e = _exp(-tl.abs(z))
    n = 1.0 + e
    larger = _reciprocal(n)
    # A Newton step, to a unit in the last place: in the derivative of silu, errors count z times.
    larger *= 2.0 - n * larger
    smaller = e * larger
    negative = z < 0.0
    return tl.where(negative, smaller, larger), tl.where(negative, larger, smaller)


@triton.jit
def _normal(z):
    """Distribution function and density of the normal distribution.

    In fp32 within 3e-7, without erf's branches, and with one exponential for both: Abramowitz and
    Stegun, "Handbook of Mathematical Functions", 7.1.26, for the smaller of the two tails.
    """
    e = _exp(-0.5 * z * z)
    if z.dtype == tl.float64:
        cdf = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
    else:
        t = _reciprocal(1.0 + 0.23164189 * tl.abs(z))
        tail = -0.7265760 + t * 0.5307027
        tail = 0.7107069 + t * tail
        tail = -0.1422484 + t * tail
        tail = 0.1274148 + t * tail
        tail = tail * t * e
        cdf = tl.where(z < 0.0, tail, 1.0 - tail)
    return cdf, e * 0.3989422804014327


@triton.jit
def _ramp(z):
    """0 below -3, 1 above 3, and linear between; NaN for NaN."""
    ramp = z * 0.16666666666666666 + 0.5
    return tl.where(z <= -3.0, 0.0, tl.where(z >= 3.0, 1.0, ramp))
