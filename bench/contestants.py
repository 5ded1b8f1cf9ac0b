"""Layers that `compare.py` times side by side, a gate that they agree, and the memory of a step."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_peers import EPS, MOMENTUM, native
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.profiler import ProfilerActivity, profile

from syncbn_triton import SyncBatchNorm

OURS, ALONE = "ours", "ours, no collective"
NATIVE, TORCH = "nn.BatchNorm", "torch.nn.SyncBatchNorm"
SQUARES, COMPILED = "sum of squares", "F.batch_norm, compiled"
# Whose statistics are those of all ranks.
SYNCHRONIZED = (OURS, TORCH, SQUARES)


class SquaresFunction(torch.autograd.Function):
    """Synchronized by one all-reduce of ``[sum | sum of squares | count]`` in plain torch.

    The short way to write such a layer: ``var = E[x^2] - E[x]^2`` in the input's dtype, and the
    normalized input kept for backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor
    ) -> Tensor:
        axes = [0, *range(2, x.dim())]
        count = x.new_full((1,), x.numel() / x.shape[1])
        sums = torch.cat([x.sum(axes), (x * x).sum(axes), count])
        _sum_over_ranks(sums)
        mean, mean_square = (sums[:-1] / sums[-1]).chunk(2)
        var = mean_square - mean * mean
        unbiased = var * (sums[-1] / (sums[-1] - 1))
        running_mean.lerp_(mean, MOMENTUM)
        running_var.lerp_(unbiased, MOMENTUM)
        invstd = (var + EPS).rsqrt()
        x_hat = (x - _as(mean, x)) * _as(invstd, x)
        ctx.save_for_backward(x_hat, weight, invstd, sums[-1])
        return x_hat * _as(weight, x) + _as(bias, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, weight, invstd, count = ctx.saved_tensors
        axes = [0, *range(2, dy.dim())]
        grad_bias, grad_weight = dy.sum(axes), (dy * x_hat).sum(axes)
        sums = torch.cat([grad_bias, grad_weight])
        _sum_over_ranks(sums)
        mean_dy, mean_dy_x_hat = (sums / count).chunk(2)
        dx = dy - _as(mean_dy, dy) - x_hat * _as(mean_dy_x_hat, dy)
        return dx * _as(weight * invstd, dy), grad_weight, grad_bias, None, None


class SquaresLayer(_BatchNorm):
    """A layer over `SquaresFunction`."""

    def forward(self, input: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        buffers = (self.running_mean, self.running_var)
        y: Tensor = SquaresFunction.apply(input, self.weight, self.bias, *buffers)
        return y


class CompiledLayer(_BatchNorm):
    """Training by ``F.batch_norm``, compiled for each size."""

    def forward(self, input: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        buffers = (self.running_mean, self.running_var)
        return _compiled()(input, *buffers, self.weight, self.bias, True, MOMENTUM, EPS)


@cache
def _compiled() -> Callable[..., Tensor]:
    # Not on import, which the compiler's own takes seconds of.
    return torch.compile(F.batch_norm, dynamic=False)


def layers(
    x: Tensor, alone: dist.ProcessGroup | None, compiled: bool = True
) -> dict[str, nn.Module]:
    """The layers for an input, in this world.

    Args:
        x: ``(N, C, *)``.
        alone: A group of this rank only, for our layer without its collectives; None in a world of
            one, where it has none.
        compiled: Whether to time the compiled function too.
    """
    C, device = x.shape[1], x.device
    found: dict[str, nn.Module] = {
        NATIVE: native(C, x.dim(), device),
        OURS: SyncBatchNorm(C, EPS, MOMENTUM, device=device),
        SQUARES: SquaresLayer(C, EPS, MOMENTUM, device=device),
    }
    if compiled:
        found[COMPILED] = CompiledLayer(C, EPS, MOMENTUM, device=device)
    if alone is not None:
        found[ALONE] = SyncBatchNorm(C, EPS, MOMENTUM, process_group=alone, device=device)
        # In a world of one it is F.batch_norm; on the CPU it is refused.
        if x.is_cuda:
            found[TORCH] = nn.SyncBatchNorm(C, EPS, MOMENTUM, device=device)
    return found


def must_agree(contestants: dict[str, nn.Module], x: Tensor, dy: Tensor) -> None:
    """Fails where layers that should compute the same do not: a wrong one is not to be timed."""
    synchronized = {name: layer for name, layer in contestants.items() if name in SYNCHRONIZED}
    rest = {name: layer for name, layer in contestants.items() if name not in SYNCHRONIZED}
    if ALONE not in contestants:
        # A world of one.
        synchronized, rest = contestants, {}
    for same in (synchronized, rest):
        results = {name: _step(layer, x, dy) for name, layer in same.items()}
        first = next(iter(results), "")
        for name, result in results.items():
            message = partial("{} against {}: {}".format, name, first)
            torch.testing.assert_close(
                result, results[first], rtol=1e-3, atol=1e-3 * len(x) ** 0.5, msg=message
            )


def peak_memory(layer: nn.Module, x: Tensor, dy: Tensor) -> int:
    """Most bytes that a step allocates at a time, its results included."""
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        _step(layer, x, dy)
        return torch.cuda.max_memory_allocated(x.device) - before
    with (
        _stderr_discarded(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        _step(layer, x, dy)
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@contextmanager
def _stderr_discarded() -> Iterator[None]:
    """Discards what native code writes: the profiler announces each start and stop."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _step(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def _sum_over_ranks(packed: Tensor) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(packed)


def _as(c: Tensor, x: Tensor) -> Tensor:
    """A value per channel, to be broadcast over x."""
    return c.view(-1, *[1] * (x.dim() - 2))
