"""However a batch is shared out, and in whichever order parts merge, the result is the same."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool
from rounding import assert_step_rounds
from steps import check_step_on_ranks, step_of_parts
from strategies import DTYPES, SEEDS, examples
from syncbn_triton.kernels.merge import merge_moments
from test_kernels import make_layer
from torch import Tensor

FORMATS = st.sampled_from([torch.contiguous_format, torch.channels_last])
CHANNELS_AND_SPACE = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


def splits(most_parts: int) -> st.SearchStrategy[list[int]]:
    """Samples of each part, none in some, and in all more than one."""
    parts = st.lists(st.integers(0, 4), min_size=1, max_size=most_parts)
    return parts.filter(lambda split: sum(split) > 1)


@examples(15)
@given(
    seed=SEEDS,
    dtype=DTYPES,
    split_and_order=splits(5).flatmap(
        lambda split: st.tuples(st.just(split), st.permutations(range(len(split))))
    ),
    size=CHANNELS_AND_SPACE,
    memory_format=FORMATS,
)
def test_any_split_added_in_any_order_is_the_whole_batch(
    backend: str,
    seed: int,
    dtype: torch.dtype,
    split_and_order: tuple[list[int], list[int]],
    size: tuple[int, ...],
    memory_format: torch.memory_format,
) -> None:
    torch.manual_seed(seed)
    split, order = split_and_order
    x, dy = (
        torch.randn(sum(split), *size).to(dtype).contiguous(memory_format=memory_format)
        for _ in range(2)
    )
    layer = make_layer(size[0], dtype)
    step = step_of_parts(layer, x.split(split), dy.split(split), order)
    assert_step_rounds(step, layer, x, dy)


@examples(5)
@given(seed=SEEDS, dtype=DTYPES, split=splits(3), size=CHANNELS_AND_SPACE, memory_format=FORMATS)
def test_any_split_over_ranks_is_the_whole_batch(
    ranks: RankPool,
    backend: str,
    seed: int,
    dtype: torch.dtype,
    split: list[int],
    size: tuple[int, ...],
    memory_format: torch.memory_format,
) -> None:
    torch.manual_seed(seed)
    # A world of one shares nothing out.
    split = [*split, 0] if len(split) == 1 else split
    xs = torch.randn(sum(split), *size).to(dtype).split(split)
    check_step_on_ranks(ranks, backend, make_layer(size[0], dtype), xs, memory_format)


def merged(rows: Tensor) -> Tensor:
    packed = torch.empty(rows.shape[1], dtype=torch.float64)
    merge_moments(len(rows), rows.shape[1] // 2, rows.device).launch(rows, packed)
    return packed


@examples(60)
@given(
    seed=SEEDS,
    C=st.integers(1, 9),
    counts=st.lists(st.integers(1, 2**20), min_size=1, max_size=9),
    offset=st.sampled_from([0.0, 1.0, 1e4]),
    data=st.data(),
)
def test_partial_moments_merge_in_any_grouping_and_order(
    seed: int, C: int, counts: list[int], offset: float, data: st.DataObject
) -> None:
    """In groups as programs' rows are, and the groups as ranks' packed moments are."""
    torch.manual_seed(seed)
    n = torch.tensor(counts, dtype=torch.float64).unsqueeze(1)
    means, m2s = torch.randn(len(counts), C).double() + offset, n * torch.rand(len(counts), C)
    rows = torch.cat([means, m2s, n], dim=1)
    whole = merged(rows)

    order = data.draw(st.permutations(range(len(counts))))
    ends = data.draw(st.sets(st.integers(1, len(counts)))) | {len(counts)}
    bounds = [0, *sorted(ends)]
    groups = [order[i:j] for i, j in pairwise(bounds)]
    grouped = sum(merged(rows[group]) for group in groups)

    assert grouped[-1] == whole[-1] == sum(counts)
    # A few roundings for each row, of terms that may cancel in the sum but not in its size.
    sizes = torch.cat([(n * means).abs(), m2s + n * means.square(), n], dim=1).sum(0)
    bound = 4 * len(counts) * torch.finfo(torch.float64).eps * sizes
    assert ((grouped - whole).abs() <= bound).all()
