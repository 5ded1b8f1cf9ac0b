"""What a failed call leaves behind: nothing. Buffers and parameters stay, and the next call works.

A rank that raises before a collective leaves the others waiting there, until the timeout of the
group: these tests make a group with a short one, and train in the default group afterwards.
"""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from oracle import Layer, Step, assert_step
from ranks import RankPool
from test_cases_groups import gathered
from test_cases_ranks import random_layer
from test_module import BAD_INPUT
from test_parity import build
from torch import Tensor

from syncbn_triton import SyncBatchNorm

SHORT = timedelta(seconds=3)


def step(module: SyncBatchNorm, x: Tensor, dy: Tensor) -> Step:
    x.requires_grad_()
    y = module(x)
    y.backward(dy)
    grads = (x.grad, module.weight.grad, module.bias.grad)
    return Step(y.detach(), *grads, module.running_mean, module.running_var)


def assert_raises_and_changes_nothing(
    module: SyncBatchNorm, exception: type[Exception], match: str, call: Callable[[], object]
) -> None:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(exception, match=match):
        call()
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert module.weight.grad is module.bias.grad is None


def train_after_bad_input(
    rank: int, case: str, culprits: list[int], layer: Layer, xs: list[Tensor], dys: list[Tensor]
) -> Step:
    """Bad input on the culprits, a good call on the others, and then one on all ranks."""
    group = dist.new_group(timeout=SHORT)
    module = build({"num_features": 3, "process_group": group}, layer)
    if rank in culprits:
        exception, match, call = BAD_INPUT[case]
        assert_raises_and_changes_nothing(module, exception, match, lambda: call(module))
    else:
        # Either this rank waits in vain, or one that did has closed the connection.
        in_vain = "Timed out|timeout|[Cc]onnection"
        assert_raises_and_changes_nothing(module, RuntimeError, in_vain, lambda: module(xs[rank]))
    module.process_group = None
    result = step(module, xs[rank], dys[rank])
    assert module.num_batches_tracked == 1
    return result


@pytest.mark.parametrize(
    ("case", "culprits", "world_size"),
    [
        ("wrong channels", [1], 2),
        ("integers", [0], 3),
        *[(case, [0, 1], 2) for case in BAD_INPUT],
    ],
    ids=str,
)
def test_bad_input_changes_nothing_on_any_rank(
    ranks: RankPool, case: str, culprits: list[int], world_size: int
) -> None:
    layer = random_layer(3)
    xs, dys = torch.randn(2, world_size, 2, 3, 4)
    arguments = (case, culprits, layer, list(xs), list(dys))
    steps = ranks.run(world_size, train_after_bad_input, *arguments)
    assert_step(gathered([vars(s) for s in steps]), layer, xs.flatten(0, 1), dys.flatten(0, 1))


def train_after_lost_backward(
    rank: int, layer: Layer, xs: list[Tensor], dys: list[Tensor]
) -> tuple[Layer, Step]:
    """Rank 1 gives up between forward and backward; then a step on all ranks."""
    module = build({"num_features": 3, "process_group": dist.new_group(timeout=SHORT)}, layer)
    y = module(xs[rank])
    if rank != 1:
        assert_raises_and_changes_nothing(
            module, RuntimeError, "Timed out|timeout|[Cc]onnection", lambda: y.backward(dys[rank])
        )
    module.process_group = None
    after = Layer(layer.weight, layer.bias, module.running_mean.clone(), module.running_var.clone())
    return after, step(module, xs[rank], dys[rank])


def test_a_lost_backward_leaves_no_gradients(ranks: RankPool) -> None:
    xs, dys = torch.randn(2, 2, 2, 3, 4)
    arguments = (random_layer(3), list(xs), list(dys))
    results = ranks.run(2, train_after_lost_backward, *arguments)
    steps = [vars(s) for _, s in results]
    assert_step(gathered(steps), results[0][0], xs.flatten(0, 1), dys.flatten(0, 1))
