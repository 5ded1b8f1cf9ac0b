"""Empty input under DistributedDataParallel, as in torch's test_c10d_common.py.

There, results are only free of NaN. Here they are those of one process in float64 without the empty
batches.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from test_torch_suite import State, assert_states, snapshot
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_triton import convert_sync_batchnorm

MODELS = {
    "only": lambda: nn.Sequential(nn.BatchNorm2d(2)),
    "in a net": lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Linear(7, 2)),
}


def step(model: nn.Module, x: Tensor, needs_grad: bool) -> State:
    """Output, gradients and state after one forward and backward."""
    x = x.clone().requires_grad_(needs_grad)
    model.zero_grad()
    y = model(x)
    y.pow(3).sum().backward()
    gradients = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters()}
    if needs_grad:
        gradients["x.grad"] = x.grad
    return {"y": y.detach(), **gradients, **snapshot(model)}


def steps_on_rank(
    rank: int, model: nn.Module, batches: list[list[Tensor]], needs_grad: bool
) -> list[State]:
    """A step for each batch, of a model converted within DistributedDataParallel."""
    model = convert_sync_batchnorm(DistributedDataParallel(model), dist.group.WORLD)
    states = [step(model, shares[rank], needs_grad) for shares in batches]
    return [{name.removeprefix("module."): t for name, t in state.items()} for state in states]


def exact_steps(model: nn.Module, x: Tensor) -> tuple[State, State]:
    """A step of one process in float64, and then one on an empty batch, which changes nothing."""
    model = copy.deepcopy(model).double()
    full = step(model, x.double(), True)
    empty = {name: torch.zeros_like(t) if name.endswith("grad") else t for name, t in full.items()}
    return full, empty | {"y": full["y"][:0], "x.grad": full["x.grad"][:0]}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [("aten", torch.float32), ("aten", torch.float64), ("triton", torch.float32)],
    ids=str,
)
def test_empty_input(
    ranks: RankPool, implementation: str, case: str, needs_grad: bool, dtype: torch.dtype
) -> None:
    """A batch that is empty on rank 0, then one that is empty on both ranks."""
    model = MODELS[case]().to(dtype)
    empty, x = torch.empty(0, 2, 11, 9, dtype=dtype), torch.randn(3, 2, 11, 9, dtype=dtype)
    batches = [[empty, x], [empty, empty]]
    results = ranks.run(2, steps_on_rank, model, batches, needs_grad, backend=implementation)
    for rank, states in enumerate(results):
        for ours, exact in zip(states, exact_steps(model, x), strict=True):
            for name, value in ours.items():
                # DistributedDataParallel takes the mean over two ranks.
                if name.endswith("grad") and name != "x.grad":
                    value *= 2
            if not needs_grad:
                del exact["x.grad"]
            if rank == 0:
                exact |= {name: exact[name][:0] for name in ("y", "x.grad") if name in exact}
            assert_states(ours, exact, dtype)
