"""Batches that the kernels must get right on a GPU, and layers to normalize them."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Here for all who import this file, and after it `rounding` or `ranks`.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from oracle import Layer

DTYPES = ("float16", "bfloat16", "float32", "float64")
CONTIGUOUS, LAST, LAST_3D = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
# Beyond this offset in elements, 32 bits are not enough.
_FAR = 2**31


@dataclass(frozen=True)
class Case:
    """A batch, and what is unusual about it.

    ``mean`` is |mean| / std, ``y_error`` a bound of its own on y, ``shift`` the elements by which
    memory starts off its alignment, ``far`` puts samples 2^31 elements apart.
    """

    name: str
    size: tuple[int, ...]
    memory_format: torch.memory_format = CONTIGUOUS
    dy_format: torch.memory_format | None = None
    mean: float = 0.0
    y_error: float | None = None
    shift: int = 0
    far: bool = False
    weight: bool = True
    bias: bool = True
    momentum: float | None = 0.1
    parameters: torch.dtype | None = None
    dtypes: tuple[str, ...] = DTYPES


_SIZES = {
    "stem": (16, 64, 112, 112),
    "block": (16, 64, 56, 56),
    "rows of 49": (32, 256, 7, 7),
    "24 channels": (64, 24, 14, 14),
    "odd": (8, 65, 17, 17),
    "3 channels": (4, 3, 224, 224),
}
_MISALIGNED = (16, 64, 56, 56)
CASES: tuple[Case, ...] = (
    *(Case(name, size, CONTIGUOUS) for name, size in _SIZES.items()),
    *(Case(f"{name}, channels-last", size, LAST) for name, size in _SIZES.items()),
    Case("3-D", (2, 8, 16, 16, 16)),
    Case("3-D, channels-last", (2, 8, 16, 16, 16), LAST_3D),
    Case("sequence", (4, 6, 1100)),
    Case("2-D", (4096, 256)),
    Case("2-D, ragged", (37, 11)),
    Case("one sample", (1, 3, 6, 7)),
    Case("one channel", (3, 1, 5, 5)),
    Case("many channels, average over all", (8, 1030), momentum=None),
    Case("formats differ", (3, 24, 9, 10), LAST, dy_format=CONTIGUOUS),
    Case("formats differ, the other way", (3, 24, 9, 10), CONTIGUOUS, dy_format=LAST),
    Case("without weight", (3, 24, 9, 10), weight=False),
    Case("without bias", (3, 24, 9, 10), bias=False),
    Case("misaligned", _MISALIGNED, shift=1),
    Case("misaligned, channels-last", _MISALIGNED, LAST, shift=1),
    Case("samples 2^31 apart", (2, 64, 5, 8), far=True, dtypes=("bfloat16",)),
    Case("fp32 parameters", (16, 64, 56, 56), parameters=torch.float32, dtypes=DTYPES[:2]),
    # The bounds that the docstrings give for fp32.
    *(
        Case(
            f"mean {mean:.0e}",
            (8, 3, 16, 16),
            mean=mean,
            y_error=bound,
            weight=False,
            bias=False,
            dtypes=("float32",),
        )
        for mean, bound in ((1e2, 2e-6), (1e4, 2e-6), (1e6, 1e-3))
    ),
    *(
        Case(
            f"mean {mean:.0e}, channels-last", (8, 64, 32, 32), LAST, mean=mean, dtypes=("float32",)
        )
        for mean in (1e4, 1e6)
    ),
)


def make_layer(case: Case, dtype: torch.dtype) -> Layer:
    """A layer away from its initial state; its values exist in dtype whatever it holds them in."""
    C = case.size[1]
    held_in = case.parameters or dtype
    weight, bias, mean, var = (
        t.to(dtype).to(held_in)
        for t in (torch.rand(C) + 0.5, torch.randn(C), torch.randn(C), torch.rand(C) + 0.5)
    )
    return Layer(
        weight if case.weight else None, bias if case.bias else None, mean, var, case.momentum
    )


def place(
    t: Tensor, memory_format: torch.memory_format, case: Case, device: torch.device
) -> Tensor:
    """A batch on the device, in the memory that a case wants."""
    t = t.contiguous(memory_format=memory_format).to(device)
    if case.far:
        stride = (_FAR, *t.stride()[1:])
        placed = t.new_empty(_FAR * (t.shape[0] - 1) + t[0].numel()).as_strided(t.shape, stride)
        return placed.copy_(t)
    if case.shift:
        memory = t.new_empty(t.numel() + case.shift)
        return memory.as_strided(t.shape, t.stride(), case.shift).copy_(t)
    return t
