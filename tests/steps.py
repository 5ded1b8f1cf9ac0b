"""A training step of the layer on several ranks, and one of its operations on parts of a batch."""

from collections.abc import Iterable, Sequence

import torch
from oracle import Layer, Step
from ranks import RankPool
from rounding import assert_step_rounds
from test_parity import step_on_rank
from torch import Tensor

from syncbn_triton import operations


def fresh(C: int, momentum: float = 0.1, eps: float = 1e-5) -> Layer:
    """A layer in its initial state."""
    return Layer(torch.ones(C), torch.zeros(C), torch.zeros(C), torch.ones(C), momentum, eps)


def step_on_ranks(
    ranks: RankPool,
    backend: str,
    layer: Layer,
    xs: Sequence[Tensor],
    memory_format: torch.memory_format = torch.contiguous_format,
) -> tuple[Step, Tensor]:
    """One step with a batch on each rank, and the gradients that all of y was given."""
    C, dtype = xs[0].shape[1], layer.weight.dtype
    options = {"num_features": C, "momentum": layer.momentum, "eps": layer.eps, "dtype": dtype}
    dys = [torch.randn_like(x) for x in xs]
    arguments = (options, layer, xs, dys, memory_format)
    results = ranks.run(len(xs), step_on_rank, *arguments, backend=backend)
    step = Step(
        torch.cat([r["y"] for r in results]),
        torch.cat([r["dx"] for r in results]),
        _sum_in_fp64(r["grad_weight"] for r in results),
        _sum_in_fp64(r["grad_bias"] for r in results),
        results[0]["running_mean"],
        results[0]["running_var"],
    )
    return step, torch.cat(dys)


def check_step_on_ranks(
    ranks: RankPool,
    backend: str,
    layer: Layer,
    xs: Sequence[Tensor],
    memory_format: torch.memory_format = torch.contiguous_format,
) -> None:
    """Compares all that a step on ranks computes with the oracle."""
    step, dy = step_on_ranks(ranks, backend, layer, xs, memory_format)
    assert_step_rounds(step, layer, torch.cat(xs), dy)


def step_of_parts(
    layer: Layer, xs: Sequence[Tensor], dys: Sequence[Tensor], order: Sequence[int] | None = None
) -> Step:
    """One step with the parts of a batch, as if each were a rank's and were added in this order."""
    order = range(len(xs)) if order is None else order
    running = [(layer.running_mean.clone(), layer.running_var.clone()) for _ in xs]
    moments = [operations.channel_stats(x) for x in xs]
    of_all = sum(moments[i] for i in order)
    affine, options = (layer.weight, layer.bias), (layer.momentum, layer.eps)
    forward = [
        operations.normalize(x, of_all, *affine, *buffers, torch.tensor(0), *options)
        for x, buffers in zip(xs, running, strict=True)
    ]
    ys, stats = zip(*forward, strict=True)

    dtypes = [t.dtype for t in affine]
    backward = [
        operations.backward_reduce(*part, *dtypes) for part in zip(xs, dys, stats, strict=True)
    ]
    sums, grad_weights, grad_biases, _ = zip(*backward, strict=True)
    of_all = sum(sums[i] for i in order)
    dxs = [
        operations.backward_input(*part, layer.weight, of_all)
        for part in zip(xs, dys, stats, strict=True)
    ]
    grads = _sum_in_fp64(grad_weights), _sum_in_fp64(grad_biases)
    return Step(torch.cat(ys), torch.cat(dxs), *grads, *running[-1])


def _sum_in_fp64(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)
