"""The layer as a module."""

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Self

from .activation import check
from .functional import sync_batch_norm


class SyncBatchNorm(_BatchNorm):
    r"""Batch normalization over the batches of all ranks, in place of ``torch.nn.SyncBatchNorm``.

    .. math:: y = \mathrm{activation}\left(\frac{x - \mathrm{E}[x]}{\sqrt{\mathrm{Var}[x] +
              \mathrm{eps}}} \cdot \mathrm{weight} + \mathrm{bias} + \mathrm{residual}\right)

    where the mean and the biased variance are taken per channel, in training over every rank of the
    process group; activation and residual are optional. Arguments, attributes and state_dict are
    those of ``torch.nn.SyncBatchNorm``, so checkpoints load both ways, and from
    ``torch.nn.BatchNorm*d``. In addition it runs on the CPU and in a world of one; an empty batch
    is as good as any other; and a batch that is empty on all ranks leaves the running statistics
    alone.

    Only training synchronizes: each rank of the group must then make the same calls in the same
    order, and forward and backward issue one all-reduce each. See :func:`sync_batch_norm` for
    dtypes and error bounds.

    Args:
        num_features: ``C`` of an input ``(N, C, *)``.
        eps: Added to the variance.
        momentum: Share of the new batch in the running statistics; None for the average over all
            batches.
        affine: Whether to learn a weight and a bias.
        track_running_stats: Whether to keep running statistics. Without them, the statistics of
            the batch serve in evaluation too, those of this rank alone.
        process_group: Ranks to synchronize with; None for all.
        device: Device of parameters and buffers.
        dtype: dtype of parameters and buffers; the input's may differ.
        bias: Whether an affine layer learns a bias.
        activation: None, ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"`` or ``"hardswish"``,
            in the same pass over memory. Backward saves nothing more for it, but for ``relu`` and
            ``leaky_relu`` with a residual one byte per element.
        negative_slope: Of ``leaky_relu``.

    Shape:
        - Input: ``(N, C, *)``
        - Residual: ``(N, C, *)`` or None, added before the activation
        - Output: ``(N, C, *)``, of the input's dtype and memory format

    Example::

        model = syncbn_triton.convert_sync_batchnorm(model).to(device)
        model = torch.nn.parallel.DistributedDataParallel(model)
    """

    process_group: dist.ProcessGroup | None
    # The class a conversion found, which `revert_sync_batchnorm` restores.
    converted_from: type[_BatchNorm] | None = None
    activation: str | None = None
    negative_slope: float = 0.01

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: str | None = None,
        negative_slope: float = 0.01,
    ) -> None:
        check(activation)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group
        self.activation = activation
        self.negative_slope = negative_slope

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        if self.activation is not None:
            parts.append(f"activation={self.activation!r}")
        if self.activation == "leaky_relu":
            parts.append(f"negative_slope={self.negative_slope}")
        return ", ".join(parts)

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        # Not the base class's, which before torch 2.13 takes a bias for granted.
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        uses_running = self.track_running_stats or not self.training
        return sync_batch_norm(
            input,
            self.running_mean if uses_running else None,
            self.running_var if uses_running else None,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
            self.process_group,
            self.num_batches_tracked if uses_running else None,
            residual,
            self.activation,
            self.negative_slope,
        )

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Replaces every batch norm by this class; see :func:`convert_sync_batchnorm`."""
        from .convert import convert

        return convert(module, cls, process_group)

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A process group cannot be copied, and a copy belongs to the same ranks.
        memo[id(self.process_group)] = self.process_group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # Nor can it be pickled; `__setstate__` tells who loads it.
        state = self.__dict__.copy()
        state["process_group"] = None
        state["_had_process_group"] = self.process_group is not None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        had_process_group = state.pop("_had_process_group", False)
        super().__setstate__(state)
        if had_process_group:
            warnings.warn(
                "a SyncBatchNorm was saved with a process group, which cannot be loaded: set its "
                "process_group, or it synchronizes with all ranks",
                stacklevel=2,
            )
