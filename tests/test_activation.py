"""A fused residual and activation against torch's layer, sum and activation in float64.

Oracle and pass rule are those of `oracle` and `rounding`, on the batches of all ranks together.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Layer, torch_step
from ranks import RankPool
from rounding import sizes_of_terms
from syncbn_triton.kernels.blocks import Blocks
from syncbn_triton.kernels.epilogue import ACTIVATIONS, PIECEWISE_LINEAR, Epilogue
from syncbn_triton.kernels.launchers import (
    backward_input,
    backward_reduce,
    channel_stats,
    normalize,
)
from test_kernels import make_layer
from test_parity import build
from torch import Tensor

Tensors = dict[str, Tensor]
# Not the default.
SLOPE = 0.2
KINKS = {"relu": (0.0,), "leaky_relu": (0.0,), "hardswish": (-3.0, 3.0)}
# With a residual and without.
CASES = [(activation, added) for activation in ACTIVATIONS for added in (False, True)]
CASES += [(None, True)]
SPLITS = {"1": (3,), "2 uneven": (1, 4), "2, one empty": (3, 0)}
FORMATS = {
    "2-D": ((33,), torch.contiguous_format),
    "contiguous": ((5, 6, 7), torch.contiguous_format),
    "channels-last": ((5, 6, 7), torch.channels_last),
    "rows of 49": ((8, 7, 7), torch.contiguous_format),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def activate(z: Tensor, activation: str | None) -> Tensor:
    """As torch does."""
    if activation is None:
        return z
    return F.leaky_relu(z, SLOPE) if activation == "leaky_relu" else getattr(F, activation)(z)


def composed_step(
    layer: Layer,
    x: Tensor,
    residual: Tensor | None,
    dy: Tensor,
    activation: str | None,
    dtype: torch.dtype,
) -> dict[str, Tensor | None]:
    """One step of torch's layer, sum and activation on the whole batch.

    In one dtype, but for a residual that has another than x where this dtype is that of x.
    """
    normalized = torch_step(layer, x, dy, dtype).y.requires_grad_()
    y, added = normalized, None
    if residual is not None:
        added = residual.detach().to(residual.dtype if dtype == x.dtype else dtype, copy=True)
        y = normalized + added.requires_grad_()
    y = activate(y, activation)
    y.backward(dy.to(y.dtype))
    step = vars(torch_step(layer, x, normalized.grad, dtype))
    return {**step, "y": y.detach(), "dresidual": None if added is None else added.grad}


def steady(
    layer: Layer, x: Tensor, residual: Tensor | None, dy: Tensor, activation: str | None
) -> Tensor:
    """This dy, and 0 where rounding decides on which side of a kink the argument is.

    Torch's composition rounds the argument twice in x's dtype, each time by half an ulp at most.
    There the derivative may be any of two, and 0 times each is the same.
    """
    terms = [torch_step(layer, x, dy, torch.float64).y]
    if residual is not None:
        terms += [residual.double(), terms[0] + residual.double()]
    margin = 2 * torch.finfo(x.dtype).eps * torch.stack(terms).abs().amax()
    near = torch.zeros_like(dy, dtype=torch.bool)
    for kink in KINKS.get(activation, ()):
        near |= (terms[-1] - kink).abs() <= margin
    assert near.double().mean() < 0.25
    # Unlike `masked_fill`, in the format of dy.
    return torch.where(near, 0, dy)


def sizes_of_composed_terms(
    layer: Layer, x: Tensor, residual: Tensor | None, dy: Tensor
) -> dict[str, Tensor]:
    """What bounds each part of a step if nothing in it cancels.

    No activation here enlarges its argument, and none but `gelu` and `silu`, by an eighth, a
    gradient.
    """
    z = torch_step(layer, x, dy, torch.float64).y
    if residual is not None:
        z = z + residual.double()
    dz = dy.double().abs()
    sizes = vars(sizes_of_terms(layer, x, dz.to(x.dtype)))
    return {**sizes, "y": sizes["y"] + z.abs(), "dresidual": dz}


def assert_composed(
    actual: dict[str, Tensor | None],
    layer: Layer,
    x: Tensor,
    residual: Tensor | None,
    dy: Tensor,
    activation: str | None,
) -> None:
    """Compares each part of a step with the oracle; tensors are those of all ranks together."""
    arguments = (layer, x, residual, dy, activation)
    exact = composed_step(*arguments, torch.float64)
    torchs = composed_step(*arguments, x.dtype)
    sizes = sizes_of_composed_terms(layer, x, residual, dy)
    # As in `rounding`.
    in_fp64 = x.dtype == torch.float64
    rounding = 16 * torch.finfo(x.dtype).eps if in_fp64 else torch.finfo(torch.float32).eps
    assert actual.keys() == exact.keys()
    for name, ours in actual.items():
        right = exact[name]
        if ours is None:
            assert right is None
            continue
        torch_error = (torchs[name].double() - right).abs().amax()
        ulp = max(torch.finfo(ours.dtype).eps, torch.finfo(x.dtype).eps)
        bound = 2 * torch_error + ulp * right.abs().amax() + rounding * sizes[name].amax()
        error = (ours.double() - right).abs().amax()
        case = f"{name} of {activation} {'with' if residual is not None else 'without'} residual"
        assert error <= bound, f"{case}: error {error:.3e} above the bound {bound:.3e}"


def steps_on_rank(
    rank: int,
    layer: Layer,
    cases: list[tuple[str | None, bool, list[Tensor]]],
    xs: list[Tensor],
    residuals: list[Tensor],
    memory_format: torch.memory_format,
) -> list[dict[str, Any]]:
    """One training step on this rank's share of the batch for each activation."""
    results = []
    for activation, added, dys in cases:
        x = xs[rank].contiguous(memory_format=memory_format).requires_grad_()
        residual = residuals[rank].contiguous(memory_format=memory_format).requires_grad_()
        options = {"num_features": x.shape[1], "dtype": x.dtype}
        module = build({**options, "activation": activation, "negative_slope": SLOPE}, layer)
        y = module(x, residual if added else None)
        wanted = [x, module.weight, module.bias, *([residual] if added else [])]
        dx, grad_weight, grad_bias, *others = torch.autograd.grad(y, wanted, dys[rank])
        for result in (y, dx, *others):
            assert result.dtype == x.dtype
        for result in (y, dx):
            assert not x.numel() or result.is_contiguous(memory_format=memory_format)
        results.append(
            {
                "y": y.detach(),
                "dx": dx,
                "grad_weight": grad_weight,
                "grad_bias": grad_bias,
                "running_mean": module.running_mean,
                "running_var": module.running_var,
                "dresidual": others[0] if added else None,
                "num_batches_tracked": module.num_batches_tracked,
            }
        )
    return results


def together(steps: list[dict[str, Any]]) -> dict[str, Tensor | None]:
    """The step of all ranks: samples one after the other, gradients of parameters in sum."""
    step = dict(steps[0])
    assert step.pop("num_batches_tracked") == 1
    for name in ("y", "dx", "dresidual"):
        if step[name] is not None:
            step[name] = torch.cat([s[name] for s in steps])
    for name in ("grad_weight", "grad_bias"):
        step[name] = torch.stack([s[name].double() for s in steps]).sum(0)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert all(torch.equal(s[name], steps[0][name]) for s in steps)
    return step


def check_steps(
    ranks: RankPool,
    backend: str,
    split: tuple[int, ...],
    size: tuple[int, ...],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
    cases: list[tuple[str | None, bool]],
) -> None:
    """Runs a step for each case on every rank, and compares it with the oracle."""
    layer = make_layer(size[0], dtype)
    x, residual, dy = torch.randn(3, sum(split), *size).to(dtype)
    dys = [steady(layer, x, residual if added else None, dy, a) for a, added in cases]
    of_ranks = [(*case, dy.split(split)) for case, dy in zip(cases, dys, strict=True)]
    arguments = (layer, of_ranks, x.split(split), residual.split(split), memory_format)
    results = ranks.run(len(split), steps_on_rank, *arguments, backend=backend)
    for (activation, added), dy, *steps in zip(cases, dys, *results, strict=True):
        added_residual = residual if added else None
        assert_composed(together(steps), layer, x, added_residual, dy, activation)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_on_ranks(ranks: RankPool, split: str, layout: str, dtype: torch.dtype) -> None:
    size, memory_format = FORMATS[layout]
    check_steps(ranks, "aten", SPLITS[split], size, dtype, memory_format, CASES)


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_steps_on_ranks_through_the_kernels(ranks: RankPool, layout: str) -> None:
    size, memory_format = FORMATS[layout]
    check_steps(ranks, "triton", (1, 4), size, torch.float32, memory_format, CASES)


@pytest.mark.parametrize(
    ("dtype", "split", "layout"),
    [
        (torch.bfloat16, "2 uneven", "rows of 49"),
        (torch.bfloat16, "2, one empty", "channels-last"),
        (torch.float16, "1", "2-D"),
        (torch.float64, "2, one empty", "2-D"),
    ],
    ids=str,
)
def test_some_more_steps_through_the_kernels(
    ranks: RankPool, dtype: torch.dtype, split: str, layout: str
) -> None:
    size, memory_format = FORMATS[layout]
    cases = [("relu", True), ("leaky_relu", False), ("gelu", True), ("hardswish", False)]
    check_steps(ranks, "triton", SPLITS[split], size, dtype, memory_format, cases)


@pytest.mark.parametrize("options", [{"affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_without_weight_or_bias(backend: str, activation: str, options: dict[str, Any]) -> None:
    x, residual, dy = torch.randn(3, 4, 5, 6)
    layer = make_layer(5, torch.float32)
    module = build({"num_features": 5, "activation": activation, **options}, layer)
    layer.weight, layer.bias = module.weight, module.bias
    x.requires_grad_()
    residual.requires_grad_()
    dy = steady(layer, x, residual, dy, activation)
    y = module(x, residual)
    y.backward(dy)
    step = {"y": y.detach(), "dx": x.grad, "dresidual": residual.grad}
    for name in ("weight", "bias"):
        parameter = getattr(module, name)
        step[f"grad_{name}"] = None if parameter is None else parameter.grad
    for name in ("running_mean", "running_var"):
        step[name] = getattr(module, name)
    assert_composed(step, layer, x, residual, dy, activation)


def run_kernels(
    layer: Layer,
    x: Tensor,
    residual: Tensor | None,
    dy: Tensor,
    activation: str | None,
    blocks: Blocks,
    needs_residual: bool,
) -> dict[str, Tensor | None]:
    """One step through the four launchers, as the layer calls them."""
    mask = dz = None
    if residual is not None and activation in PIECEWISE_LINEAR:
        mask = torch.full_like(x, 7, dtype=torch.uint8)
    epilogue = Epilogue(activation, SLOPE, residual, mask)
    moments = channel_stats(x, blocks)
    affine, running = (layer.weight, layer.bias), (layer.running_mean, layer.running_var)
    running = [t.clone() for t in running]
    tracked = (*running, torch.tensor(0), layer.momentum, layer.eps)
    y, stats = normalize(x, moments, *affine, *tracked, blocks, epilogue)
    if mask is not None:
        assert set(mask.unique().tolist()) == {0, 1}
    # What is saved for backward.
    epilogue = epilogue._replace(residual=None if mask is not None else residual)
    if activation is None:
        epilogue = epilogue._replace(residual=None)
    elif needs_residual:
        dz = torch.full_like(x, math.nan)
    dtypes = [t.dtype for t in affine]
    sums, *grads = backward_reduce(x, dy, stats, *dtypes, blocks, *affine, epilogue, dz)
    if dz is None:
        dx = backward_input(x, dy, stats, layer.weight, sums, blocks, layer.bias, epilogue)
    else:
        dx = backward_input(x, dz, stats, layer.weight, sums, blocks)
    named = {"y": y, "dx": dx, "grad_weight": grads[0], "grad_bias": grads[1]}
    named |= {"running_mean": running[0], "running_var": running[1]}
    return {**named, "dresidual": dy if activation is None and residual is not None else dz}


INPUTS = {
    "unsplit": ((3, 5, 7, 9), torch.contiguous_format, Blocks(4, 16)),
    "split": ((3, 5, 7, 9), torch.contiguous_format, Blocks(4, 16, split=3)),
    "channels-last": ((3, 5, 7, 9), torch.channels_last, Blocks(4, 16, split=3)),
    "2-D": ((37, 11), torch.contiguous_format, Blocks(8, 16)),
    "flat": ((3, 8, 5, 5), torch.contiguous_format, Blocks(4, 25, flat=True)),
    "flat, channels-last": ((2, 12, 5, 5), torch.channels_last, Blocks(12, 4, flat=True)),
}


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        *product(("split", "flat, channels-last"), CASES),
        *product(INPUTS, [("relu", True), ("gelu", False)]),
    ],
    ids=str,
)
def test_kernels_match_the_oracle(shape: str, case: tuple[str | None, bool]) -> None:
    activation, added = case
    size, memory_format, blocks = INPUTS[shape]
    x, residual, dy = (t.contiguous(memory_format=memory_format) for t in torch.randn(3, *size))
    layer = make_layer(size[1], torch.float32)
    residual = residual if added else None
    dy = steady(layer, x, residual, dy, activation)
    step = run_kernels(layer, x, residual, dy, activation, blocks, needs_residual=added)
    assert_composed(step, layer, x, residual, dy, activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_match_the_oracle_where_the_residual_needs_no_gradient(
    activation: str, dtype: torch.dtype
) -> None:
    """Both reductions compute the gradient of the sum, and neither stores it."""
    x, residual, dy = torch.randn(3, 2, 5, 7, 3).to(dtype)
    layer = make_layer(5, dtype)
    dy = steady(layer, x, residual, dy, activation)
    blocks = Blocks(4, 16, split=2)
    step = run_kernels(layer, x, residual, dy, activation, blocks, needs_residual=False)
    assert step["dresidual"] is None
    # Only for the comparison.
    step["dresidual"] = composed_step(layer, x, residual, dy, activation, dtype)["dresidual"]
    assert_composed(step, layer, x, residual, dy, activation)


def test_kernels_read_each_tensor_by_its_own_strides() -> None:
    """Nothing is copied but what no strides describe."""
    formats = (torch.contiguous_format, torch.channels_last)
    for x_format, other_format in (formats, reversed(formats)):
        x, residual, dy = torch.randn(3, 3, 5, 7, 9)
        x, residual, dy = (
            t.contiguous(memory_format=f)
            for t, f in ((x, x_format), (residual, other_format), (dy, other_format))
        )
        layer = make_layer(5, torch.float32)
        for activation in ("relu", "silu"):
            dy = steady(layer, x, residual, dy, activation)
            step = run_kernels(
                layer, x, residual, dy, activation, Blocks(4, 16, split=3), needs_residual=True
            )
            assert_composed(step, layer, x, residual, dy, activation)
            assert step["dx"].is_contiguous(memory_format=x_format)
