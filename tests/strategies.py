"""What the property tests draw."""

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
# Of torch's generator, which makes the values: a batch of them is too much to draw one by one.
SEEDS = st.integers(0, 2**16)


def examples(count: int) -> settings:
    """The same examples in every run."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        # No shrinking: examples are small as they are, and interpreted kernels slow.
        phases=[Phase.generate],
        report_multiple_bugs=False,
        # The fixture `backend` is set up once for all examples, and is the same for each.
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@st.composite
def shapes(draw: st.DrawFn, most_elements: int = 64) -> tuple[int, ...]:
    """``(N, C, *)`` of two to five dimensions, with at least two values per channel."""
    sizes = st.integers(1, 5)
    shape = draw(st.tuples(sizes, sizes, *[sizes] * draw(st.integers(0, 3))))
    while torch.Size(shape).numel() > most_elements:
        largest = shape.index(max(shape))
        shape = (*shape[:largest], shape[largest] - 1, *shape[largest + 1 :])
    alone = torch.Size(shape).numel() == shape[1]
    return (shape[0] + 1, *shape[1:]) if alone else shape


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    """Positions of elements in memory, for a tensor of this shape and of any strides.

    A view of `torch.arange`: contiguous, channels-last, permuted, cropped, with steps, expanded, or
    several of these at once.
    """
    dims = len(shape)
    channels_last = (0, *range(2, dims), 1)
    order = draw(
        st.sampled_from([tuple(range(dims)), channels_last]) | st.permutations(range(dims))
    )
    # Neighbours, most often: with a step or a margin everywhere no two dimensions ever merge.
    steps = draw(st.tuples(*[st.sampled_from([1, 1, 1, 2])] * dims))
    margins = draw(st.tuples(*[st.sampled_from([0, 0, 0, 1])] * dims))
    expanded = draw(st.sets(st.sampled_from(range(dims)), max_size=1))
    sizes = [1 if d in expanded else shape[d] * steps[d] + margins[d] for d in range(dims)]
    memory = torch.arange(torch.Size(sizes).numel()).view([sizes[d] for d in order])
    x = memory.permute([order.index(d) for d in range(dims)])
    for dim in range(dims):
        if dim not in expanded:
            x = x.narrow(dim, margins[dim], sizes[dim] - margins[dim])
            x = x[(slice(None),) * dim + (slice(None, None, steps[dim]),)]
    return x.expand(shape)


def filled(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Random values at these positions, with the same strides."""
    memory = torch.randn(positions._base.numel()).to(dtype)
    return memory.as_strided(positions.shape, positions.stride(), positions.storage_offset())
