"""Memory layouts that users of batch norms met: channels last, and offsets beyond 32 bits.

Of the cases N1 to N17, these are N12, N14 and N16.
"""

import pytest
import torch
from ranks import RankPool
from rounding import assert_step_rounds
from steps import check_step_on_ranks, fresh, step_of_parts
from syncbn_triton.kernels.blocks import Blocks
from syncbn_triton.kernels.layout import view
from test_kernels import make_layer, run_kernels
from test_parity import step_on_rank
from torch import Tensor

CHANNELS = pytest.mark.parametrize("C", [1, 3, 65, 96, 257])


def randn_around(shape: tuple[int, ...], largest_mean: float) -> Tensor:
    """Unit deviation, and a mean that grows with the channel from 0."""
    x = torch.randn(shape)
    return x + torch.linspace(0, largest_mean, shape[1]).view(1, -1, 1, 1)


@CHANNELS
def test_n12_channels_last_with_any_number_of_channels(
    ranks: RankPool, backend: str, C: int
) -> None:
    """apex#1768, pytorch#57077."""
    xs = [randn_around((n, C, 3, 3), 10.0) for n in (2, 1)]
    check_step_on_ranks(ranks, backend, make_layer(C, torch.float32), xs, torch.channels_last)


@CHANNELS
def test_n14_formats_agree(backend: str, C: int) -> None:
    """pytorch#121651; gradients of parameters and running statistics relative to the largest."""
    x, dy = randn_around((2, C, 4, 4), 100.0), torch.randn(2, C, 4, 4)
    contiguous, channels_last = (
        step_on_rank(0, {"num_features": C}, fresh(C), [x.clone()], [dy], memory_format)
        for memory_format in (torch.contiguous_format, torch.channels_last)
    )
    for name, ours in channels_last.items():
        scale = 1.0 if name in ("y", "dx") else contiguous[name].abs().max()
        assert (ours - contiguous[name]).abs().max() <= 1e-6 * scale, name


def far_apart(values: Tensor, dim: int, stride: int) -> Tensor:
    """The same values, in a view with this stride in one dimension.

    Nothing else of the memory is touched, so it is never really allocated. The view starts 2**31
    elements in: where an offset wraps around in 32 bits, a wrong element is read, not no memory.
    """
    strides = [100, 10, 1]
    strides[dim] = stride
    extent = sum((size - 1) * step for size, step in zip(values.shape, strides, strict=True)) + 1
    memory = torch.empty(2**31 + extent, dtype=values.dtype)
    return memory.as_strided(values.shape, strides, storage_offset=2**31).copy_(values)


FAR = pytest.mark.parametrize(
    ("dim", "size", "stride"),
    [
        (0, (3, 2, 4), 2**30 + 3),
        (1, (2, 3, 4), 2**30 + 3),
        (2, (2, 2, 3), 2**30 + 3),
        (0, (2, 2, 4), 2**31 + 3),
        (1, (3, 2, 4), 2**31 + 3),
        (2, (3, 2, 2), 2**31 + 3),
    ],
)


@FAR
@pytest.mark.parametrize("blocks", [Blocks(4, 4), Blocks(1, 1), Blocks(2, 2, split=3)], ids=str)
def test_n16_kernels_read_beyond_32_bit_offsets(
    dim: int, size: tuple[int, ...], stride: int, blocks: Blocks
) -> None:
    """pytorch#181555; one tile reaches that far, or the step from one tile to the next does."""
    x = far_apart(torch.randn(size).half(), dim, stride)
    dy = far_apart(torch.randn(size).half(), dim, stride)
    assert not any(view(x.shape, x.stride(), dy.stride()).copied)
    layer = make_layer(size[1], torch.float16)
    step, _ = run_kernels(layer, x, dy, blocks)
    assert_step_rounds(step, layer, x, dy)


@FAR
def test_n16_operations_read_beyond_32_bit_offsets(
    backend: str, dim: int, size: tuple[int, ...], stride: int
) -> None:
    x = far_apart(torch.randn(size).half(), dim, stride)
    dy = far_apart(torch.randn(size).half(), dim, stride)
    layer = make_layer(size[1], torch.float16)
    assert_step_rounds(step_of_parts(layer, [x], [dy]), layer, x, dy)
