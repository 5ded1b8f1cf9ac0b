"""One way to launch a kernel."""

from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .blocks import Cut


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """What a tensor of this dtype is computed in: fp64 for fp64, else fp32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def launch(kernel: Any, cut: Cut, x: Tensor, *args: Any, **constants: Any) -> None:
    """Launches a kernel over a cut view."""
    options = {"TILE": cut.tile, "num_warps": cut.num_warps, **constants}
    launch_grid(kernel, cut.grid, x, *args, **options)


def launch_grid(kernel: Any, grid: int, x: Tensor, *args: Any, **options: Any) -> None:
    """Launches ``grid`` programs on the device of x, the first argument."""
    with _on(x.device):
        # a * b + c contracts to one fused multiply-add: faster, and rounded once.
        kernel[(grid,)](x, *args, enable_fp_fusion=True, **options)


def _on(device: torch.device) -> Any:
    """Makes a device current, where another is: Triton launches on the current one."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    return nullcontext() if module.current_device() == device.index else module.device(device)
