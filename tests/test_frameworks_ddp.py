"""Under DistributedDataParallel, by any of its options, ranks train as one process does."""

from typing import Any

import pytest
from ranks import RankPool
from torch.nn.parallel import DistributedDataParallel
from training import MAX_NORM, State, assert_each_is, batches, converted, net, share, state, train


def train_with_ddp(
    rank: int, options: dict[str, Any], everywhere: bool, max_norm: float | None
) -> tuple[State, list[float]]:
    model = DistributedDataParallel(converted(), **options)
    norms = train(model, share(rank, batches(everywhere)), max_norm=max_norm)
    return state(model), norms


@pytest.mark.parametrize(
    ("options", "everywhere"),
    [
        ({"static_graph": True}, True),
        ({"gradient_as_bucket_view": True}, True),
        ({"find_unused_parameters": True}, True),
        # Rank 1 has no sample for the second head.
        ({"find_unused_parameters": True}, False),
        ({"find_unused_parameters": True, "gradient_as_bucket_view": True}, False),
    ],
    ids=str,
)
def test_ddp(ranks: RankPool, options: dict[str, bool], everywhere: bool) -> None:
    results = ranks.run(2, train_with_ddp, options, everywhere, None)
    model = net()
    train(model, batches(everywhere))
    assert_each_is((result for result, _ in results), state(model))


def test_ddp_with_gradient_clipping(ranks: RankPool) -> None:
    results = ranks.run(2, train_with_ddp, {}, True, MAX_NORM)
    model = net()
    right = train(model, batches(), max_norm=MAX_NORM)
    assert min(right) > MAX_NORM
    for actual, norms in results:
        assert_each_is([actual], state(model))
        assert norms == pytest.approx(right, rel=1e-12)
