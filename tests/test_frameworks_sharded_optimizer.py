"""With an optimizer whose state is sharded, ranks train as one process does."""

import torch
from ranks import RankPool
from torch.nn.parallel import DistributedDataParallel
from training import TIMEOUT, State, assert_each_is, batches, converted, net, share, state, train


def train_with_sharded_optimizer(rank: int) -> State:
    # Imported here: it compiles functions by torch.jit.script, which warns.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(converted())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, share(rank, batches()), optimizer)
    return state(model)


def test_zero_redundancy_optimizer(ranks: RankPool) -> None:
    results = ranks.run(2, train_with_sharded_optimizer, timeout=TIMEOUT)
    model = net()
    train(model, batches(), torch.optim.Adam(model.parameters(), lr=0.01))
    assert_each_is(results, state(model))
