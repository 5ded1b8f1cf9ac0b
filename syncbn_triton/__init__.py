"""A swap-in replacement for ``torch.nn.SyncBatchNorm``, with Triton kernels."""

from .convert import convert_sync_batchnorm, revert_sync_batchnorm
from .functional import sync_batch_norm
from .fusion import FusionReport, fuse_activations, unfuse_activations
from .groups import new_sync_groups
from .module import SyncBatchNorm

__version__ = "0.1.0"

__all__ = [
    "FusionReport",
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "fuse_activations",
    "new_sync_groups",
    "revert_sync_batchnorm",
    "sync_batch_norm",
    "unfuse_activations",
]
