"""A fused residual and activation keep and write as little for backward as the design says."""

from typing import Any

import pytest
import torch
from composed import EVERY
from syncbn_triton.kernels.epilogue import PIECEWISE_LINEAR
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn_triton import SyncBatchNorm

pytestmark = pytest.mark.usefixtures("aten")


def saved_by(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """What a forward keeps for backward."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(*inputs)
    return saved


@EVERY
@pytest.mark.parametrize("added", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["", "residual needs a gradient"])
def test_saved_tensors(backend: str, activation: str | None, added: bool, needs_grad: bool) -> None:
    """The input, one byte per element or the residual, and what is in proportion to channels."""
    module = SyncBatchNorm(3, activation=activation, dtype=torch.bfloat16)
    x = torch.randn(4, 3, 5, 6).bfloat16().requires_grad_()
    residual = torch.randn_like(x).requires_grad_(needs_grad)
    saved = saved_by(module, x, *([residual] if added else []))
    full = [t for t in saved if t.numel() == x.numel()]
    given = {x.data_ptr()}
    if not added or activation is None:
        assert len(full) == 1
    elif activation in PIECEWISE_LINEAR:
        assert [t.dtype for t in full] == [torch.bfloat16, torch.uint8]
        assert full[1].stride() == x.stride()
    else:
        assert len(full) == 2
        given.add(residual.data_ptr())
    assert {t.data_ptr() for t in full if t.dtype == x.dtype} == given
    assert all(t.numel() <= 3 * 3 + 1 for t in saved if t.numel() != x.numel())


class Operators(TorchDispatchMode):
    """Our operators that reach a device, and the names of their full-size results."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "syncbn_triton":
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            given |= kwargs or {}
            written = ["mask"] * isinstance(given.get("mask"), Tensor)
            self.written.append(written + ["wants_dz"] * given.get("wants_dz", False))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("activation", "needs_grad", "written"),
    [
        (None, True, [[], [], [], []]),
        ("silu", True, [[], [], ["wants_dz"], []]),
        ("silu", False, [[], [], [], []]),
        ("relu", True, [[], ["mask"], ["mask", "wants_dz"], []]),
        ("relu", False, [[], ["mask"], ["mask"], ["mask"]]),
    ],
)
def test_what_is_passed_from_one_operation_to_the_next(
    activation: str | None, needs_grad: bool, written: list[list[str]]
) -> None:
    """No gradient of a residual is stored that needs none."""
    x, residual = torch.randn(2, 4, 3, 5)
    residual.requires_grad_(needs_grad)
    with Operators() as operators:
        y = SyncBatchNorm(3, activation=activation)(x.requires_grad_(), residual)
        y.square().sum().backward()
    assert operators.written == written
    assert (residual.grad is not None) == needs_grad


def test_no_mask_is_written_where_no_backward_follows() -> None:
    x, residual = torch.randn(2, 4, 3, 5)
    with Operators() as operators, torch.no_grad():
        SyncBatchNorm(3, activation="relu")(x, residual)
    assert operators.written == [[], []]
