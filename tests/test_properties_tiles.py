"""However tensors lie in memory and launches are cut into tiles, the result is the same."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from rounding import assert_step_rounds
from steps import step_of_parts
from strategies import DTYPES, SEEDS, examples, filled, shapes, strided
from syncbn_triton.kernels import blocks as kernel_blocks
from syncbn_triton.kernels.blocks import Blocks, choose_blocks
from syncbn_triton.kernels.layout import Strides, View, view
from test_kernels import make_layer, run_kernels
from torch import Tensor

BLOCKS = st.builds(
    lambda block_c, block_s, split: Blocks(block_c, block_s, split),
    block_c=st.sampled_from([1, 2, 4, 8]),
    block_s=st.sampled_from([1, 2, 4, 8, 16, 32]),
    split=st.integers(1, 5),
)
UP_TO_2_24 = st.floats(0, 24).map(lambda exponent: int(2**exponent))
# Positions of x, and of dy, which may lie otherwise.
POSITIONS = shapes().flatmap(lambda shape: st.tuples(strided(shape), strided(shape)))


@examples(20)
@given(seed=SEEDS, dtype=DTYPES, positions=POSITIONS, blocks=BLOCKS)
def test_kernels_on_any_layout_in_any_tiles(
    seed: int, dtype: torch.dtype, positions: tuple[Tensor, Tensor], blocks: Blocks
) -> None:
    torch.manual_seed(seed)
    x, dy = (filled(p, dtype) for p in positions)
    layer = make_layer(x.shape[1], dtype)
    step, counter = run_kernels(layer, x, dy, blocks)
    assert_step_rounds(step, layer, x, dy)
    assert counter == 1


@examples(15)
@given(seed=SEEDS, dtype=DTYPES, positions=POSITIONS)
def test_operations_on_any_layout(
    backend: str, seed: int, dtype: torch.dtype, positions: tuple[Tensor, Tensor]
) -> None:
    torch.manual_seed(seed)
    x, dy = (filled(p, dtype) for p in positions)
    layer = make_layer(x.shape[1], dtype)
    assert_step_rounds(step_of_parts(layer, [x], [dy]), layer, x, dy)


@examples(12)
@given(
    seed=SEEDS,
    dtype=DTYPES,
    shape=st.tuples(st.integers(1, 3), st.integers(2, 6), st.integers(1, 2), st.integers(2, 4)),
    memory_format=st.sampled_from([torch.contiguous_format, torch.channels_last]),
    rows=st.integers(1, 9),
    split=st.integers(1, 5),
)
def test_kernels_in_flat_tiles(
    seed: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    memory_format: torch.memory_format,
    rows: int,
    split: int,
) -> None:
    """Any number of whole rows of contiguous memory, or of whole positions of channels-last."""
    torch.manual_seed(seed)
    x, dy = (torch.randn(shape).to(dtype).contiguous(memory_format=memory_format) for _ in range(2))
    v = view(x.shape, x.stride(), dy.stride())
    assert v.dense
    tile = (v.C, min(rows, v.S)) if v.channels_fastest else (min(rows, v.C), v.S)
    layer = make_layer(v.C, dtype)
    step, _ = run_kernels(layer, x, dy, Blocks(*tile, split, flat=True))
    assert_step_rounds(step, layer, x, dy)


def per_channel(x: Tensor) -> Tensor:
    """``(C, values)``, batch and space in order."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


@examples(300)
@given(positions=POSITIONS)
def test_a_view_addresses_the_elements_of_each_tensor(positions: tuple[Tensor, Tensor]) -> None:
    v = view(positions[0].shape, *(x.stride() for x in positions))
    for x, strides, copied in zip(positions, v.strides, v.copied, strict=True):
        tensor = x.contiguous() if copied else x
        addressed = tensor.as_strided(v[:3], strides, tensor.storage_offset())
        assert torch.equal(per_channel(addressed), per_channel(x))
        # `reshape` copies where no view of these sizes is possible, and so may `view`.
        viewable = x.reshape(x.shape[0], v.C, -1)._base is not None
        assert copied != viewable


@examples(500)
@given(
    kernel=st.sampled_from(["channel_stats", "normalize", "backward_reduce", "backward_input"]),
    N=st.sampled_from([0, 1]) | UP_TO_2_24,
    C=UP_TO_2_24,
    S=UP_TO_2_24,
    channels_fastest=st.booleans(),
    dense=st.booleans(),
    dtype=DTYPES,
    multiprocessors=st.integers(1, 200),
)
def test_chosen_blocks_cover_any_shape(
    kernel: str,
    N: int,
    C: int,
    S: int,
    channels_fastest: bool,
    dense: bool,
    dtype: torch.dtype,
    multiprocessors: int,
) -> None:
    # 128 GiB of the smallest dtype.
    assume(N * C * S <= 2**36)
    s, c = (C, 1) if channels_fastest else (1, S)
    v = View(N, C, S, (Strides(C * S, c, s if dense else s + 1),), (False,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_blocks, "multiprocessors", lambda device: multiprocessors)
        blocks = choose_blocks(kernel, v, dtype, torch.device("cpu"))
    cut = blocks.cut(v)
    _, row, tiles, tiles_per_row, tiles_per_program, full_tiles = cut.sizes
    tile_size, lanes = cut.tile.TILE_S, cut.tile.BLOCK_C * cut.tile.BLOCK_S
    for size in (lanes, blocks.num_warps):
        assert size > 0
        assert size & (size - 1) == 0

    # Tiles cover a row, or in flat tiles all channels of a group; and no tile is without work.
    if blocks.flat:
        assert lanes >= tile_size == blocks.BLOCK_C * blocks.BLOCK_S
        assert blocks.BLOCK_C == C if channels_fastest else blocks.BLOCK_S == S
        assert row == (S * C if channels_fastest else tile_size)
    else:
        assert lanes == blocks.BLOCK_C * blocks.BLOCK_S
        assert (row, tile_size) == (S, blocks.BLOCK_S)
    assert 0 <= tiles_per_row * tile_size - row < tile_size
    assert tiles == N * tiles_per_row
    # In whole tiles nothing is masked.
    assert cut.tile.EVEN_S == (row % tile_size == 0)
    assert full_tiles * tile_size <= (N * row if N == 1 or row % tile_size == 0 else 0)

    # Programs cover all tiles, and none of a reduction is without a tile: it divides by its count.
    assert (cut.split - 1) * tiles_per_program < max(tiles, 1) <= cut.split * tiles_per_program
    groups, rest = divmod(cut.grid, cut.split)
    assert rest == 0
    assert 0 <= groups * blocks.BLOCK_C - C < blocks.BLOCK_C
    assert cut.tile.EVEN_C == (C % blocks.BLOCK_C == 0)
    # The most that CUDA launches in the first dimension of a grid.
    assert 0 < cut.grid < 2**31
