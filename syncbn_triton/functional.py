"""The layer as a function: argument rules, and who takes part."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from . import debug
from .activation import activate, check
from .function import SyncBatchNormFunction
from .kernels.results import accumulator_dtype

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    process_group: dist.ProcessGroup | None = None,
    num_batches_tracked: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    negative_slope: float = 0.01,
) -> Tensor:
    r"""Batch normalization over the batches of all ranks of a process group, and what follows it.

    .. math:: y = \mathrm{activation}\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] +
              \mathrm{eps}}} \cdot \mathrm{weight} + \mathrm{bias} + \mathrm{residual}\right)

    where the mean and the biased variance are taken per channel over every rank's batch. Arguments
    are those of :func:`torch.nn.functional.batch_norm`, in its order, and some more. In training
    each rank of the group must make the same calls in the same order, each with a batch of any
    size; forward and backward issue one all-reduce each. With ``training=False``, without a process
    group, and alone in one, nothing is communicated.

    Args:
        input: ``(N, C, *)``, fp16, bf16, fp32 or fp64, on any device and in any memory format; the
            batch may be empty. Computed in fp32, fp64 for fp64.
        running_mean: ``(C,)``, or None together with running_var. Updated in place in training.
        running_var: ``(C,)``. Takes the unbiased variance, ``M / (M - 1)`` for M values in all.
        weight: ``(C,)``, or None for 1.
        bias: ``(C,)``, or None for 0.
        training: Whether to normalize by the batch of all ranks. Otherwise by the running
            statistics, or without them by the batch of this rank.
        momentum: Share of the new batch in the running statistics; None for the average over all
            batches, which needs num_batches_tracked.
        eps: Added to the variance.
        process_group: Ranks to synchronize with; None for all.
        num_batches_tracked: ``()``, int64. Grows by 1 in training, unless the batch is empty on
            every rank.
        residual: Of input's shape, in any memory format. Added before the activation in the same
            pass, if of input's dtype; of another, by an operator of its own, with torch's rules
            for the dtype of the sum.
        activation: None, ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"`` (by the error
            function) or ``"hardswish"``, in the same pass. Backward computes its derivative from
            the input; with a residual, ``relu`` and ``leaky_relu`` save one byte per element.
        negative_slope: Of ``leaky_relu``.

    Returns:
        ``(N, C, *)``, of input's dtype and memory format. For fp32 input the error against exact
        arithmetic is below 2e-6 up to ``|mean| / std = 1e4``, and 1e-3 at 1e6.

    Raises:
        ValueError: The input has fewer than two dimensions or no channels, an argument's length is
            not C, the residual's shape is not the input's, the activation is none of the above,
            there is one value per channel in a world of one, or this rank is not in the process
            group. Nothing has been communicated or changed.
        NotImplementedError: A dtype is not floating point, or not one of those above.
        RuntimeError: Arguments are on different devices.
    """
    # A trace cannot keep checks, and warns of them.
    if not torch.jit.is_tracing():  # type: ignore[attr-defined]
        _check_input(input)
        _check_channels(input, running_mean, running_var, weight, bias)
        _check_residual(input, residual)
        check(activation)
    debugging = debug.ENABLED and not torch.compiler.is_compiling()
    if not training:
        if debugging:
            debug.note_evaluation(input)
        z = _normalize_alone(input, running_mean, running_var, weight, bias, eps)
        return _add_and_activate(z, residual, activation, negative_slope)
    if (running_mean is None) != (running_var is None):
        raise ValueError(
            "expected running_mean and running_var together (got one without the other)"
        )
    if momentum is None and running_mean is not None and num_batches_tracked is None:
        raise ValueError("expected num_batches_tracked with momentum=None (got None)")
    group = _group_to_synchronize(process_group)
    if group is None and input.numel() == input.shape[1]:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.shape}"
        )
    # torch's rules decide what two dtypes add up to.
    apart = residual is not None and residual.dtype != input.dtype
    y = SyncBatchNormFunction.apply(
        input,
        weight,
        bias,
        None if apart else residual,
        running_mean,
        running_var,
        num_batches_tracked,
        momentum,
        eps,
        None if apart else activation,
        negative_slope,
        group,
        debug.forward_call(input, training) if debugging else None,
        torch.is_grad_enabled(),
    )
    return _add_and_activate(y, residual, activation, negative_slope) if apart else y


def _add_and_activate(
    z: Tensor, residual: Tensor | None, activation: str | None, negative_slope: float
) -> Tensor:
    """The epilogue as torch's own operators."""
    return activate(z if residual is None else z + residual, activation, negative_slope)


def _normalize_alone(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Evaluation, as torch's own operator: it exports, and differentiates to any order."""
    per_channel = [running_mean, running_var, weight, bias]
    if any(t is not None and t.dtype != input.dtype for t in per_channel):
        # torch mixes half input with fp32 parameters, and nothing else.
        dtype = accumulator_dtype(input)
        per_channel = [None if t is None else t.to(dtype) for t in per_channel]
    mean, var, weight, bias = per_channel
    return F.batch_norm(input, mean, var, weight, bias, mean is None, 0.0, eps)


def _check_input(input: Tensor) -> None:
    if input.dim() < 2:
        raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
    if input.shape[1] == 0:
        raise ValueError("expected a non-zero number of input channels (got 0)")
    if input.dtype not in _DTYPES:
        expected = ", ".join(str(dtype) for dtype in _DTYPES)
        raise NotImplementedError(f"expected input of dtype {expected} (got {input.dtype})")


def _check_channels(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Each has one element per channel, is floating point, and lies beside the input."""
    C = input.shape[1]
    for name, tensor in (
        ("running_mean", running_mean),
        ("running_var", running_var),
        ("weight", weight),
        ("bias", bias),
    ):
        if tensor is None:
            continue
        if tensor.shape != (C,):
            raise ValueError(
                f"expected {name} of shape ({C},) for input with {C} channels "
                f"(got {tuple(tensor.shape)})"
            )
        _check_dtype_and_device(input, name, tensor)


def _check_residual(input: Tensor, residual: Tensor | None) -> None:
    if residual is None:
        return
    if residual.shape != input.shape:
        raise ValueError(
            f"expected residual of the input's shape {tuple(input.shape)} "
            f"(got {tuple(residual.shape)}): it is not broadcast"
        )
    _check_dtype_and_device(input, "residual", residual)


def _check_dtype_and_device(input: Tensor, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise NotImplementedError(f"expected {name} of a floating dtype (got {tensor.dtype})")
    if tensor.device != input.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, input is on {input.device} "
            f"and {name} on {tensor.device}"
        )


def _group_to_synchronize(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group if it holds this rank and others, None if there is nobody to synchronize with."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(
            f"expected a process group that this rank is in (rank {dist.get_rank()} is not in the "
            f"group given, {group}: what new_group returns to ranks outside)"
        )
    return group if size > 1 else None
