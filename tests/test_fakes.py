"""What a compiler sees of a training step: shapes alone, and no operator that waits for the GPU.

Under `FakeTensorMode` tensors have no elements: reading one raises.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatched import Operators
from ranks import RankPool
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from syncbn_triton import SyncBatchNorm, operations

# Options of a layer, and whether it is given a residual.
LAYERS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"momentum": None}, True),
    ({"affine": False, "activation": "silu"}, False),
    ({"activation": "relu"}, True),
    ({"bias": False, "track_running_stats": False, "activation": "gelu"}, True),
]
SIZES = {
    "2-D": ((4, 3), torch.contiguous_format),
    "contiguous": ((4, 3, 2, 5), torch.contiguous_format),
    "channels-last": ((4, 3, 2, 5), torch.channels_last),
    "empty": ((0, 3, 2, 5), torch.contiguous_format),
}
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def step(
    options: dict[str, Any],
    added: bool,
    size: tuple[int, ...],
    memory_format: torch.memory_format = torch.contiguous_format,
    dtype: torch.dtype = torch.float32,
    create_graph: bool = False,
) -> list[Tensor]:
    """Output and gradients, those of inputs as backward returns them, and buffers."""
    module = SyncBatchNorm(3, **options)
    x = torch.randn(size, dtype=dtype).contiguous(memory_format=memory_format).requires_grad_()
    residual = x.detach().clone().requires_grad_() if added else None
    y = module(x, residual)
    wanted = [t for t in (x, residual, *module.parameters()) if t is not None]
    gradients = torch.autograd.grad(y, wanted, torch.ones_like(y), create_graph=create_graph)
    if create_graph:
        gradients = (*gradients, *torch.autograd.grad(gradients[0].cos().sum(), wanted[:1]))
    return [y, *gradients, *module.buffers()]


def looks(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize(("options", "added"), LAYERS, ids=str)
def test_a_fake_step_looks_as_a_real_one(
    backend: str, options: dict[str, Any], added: bool, shape: str
) -> None:
    size, memory_format = SIZES[shape]
    for dtype in DTYPES:
        arguments = (options, added, size, memory_format, dtype)
        with FakeTensorMode():
            fake = looks(step(*arguments))
        assert looks(step(*arguments)) == fake


def test_a_fake_tensor_has_no_elements() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.ones(1).item()


def fake_steps_on_rank(rank: int) -> None:
    for options, added in LAYERS:
        for create_graph in (False, True):
            for mode in (FakeTensorMode(), nullcontext()):
                with mode:
                    step(options, added, (4, 3, 2), create_graph=create_graph)


def test_no_step_reads_an_element(ranks: RankPool) -> None:
    """Gradients of gradients neither."""
    ranks.run(2, fake_steps_on_rank)


def operators_on_rank(rank: int, options: dict[str, Any], added: bool) -> list[str]:
    module, x = SyncBatchNorm(3, **options), torch.randn(4, 3, 2, requires_grad=True)
    residual, dy = torch.randn(4, 3, 2, requires_grad=True) if added else None, torch.ones(4, 3, 2)
    wanted = [t for t in (x, residual, *module.parameters()) if t is not None]
    with Operators() as mode:
        torch.autograd.grad(module(x, residual), wanted, dy)
    assert dist.get_world_size() == 2
    return mode.names


@pytest.mark.parametrize(("options", "added"), LAYERS, ids=str)
def test_a_step_is_four_operations_and_two_collectives(
    ranks: RankPool, options: dict[str, Any], added: bool
) -> None:
    """Nothing else runs, but the allocation of a mask where a residual goes with a ReLU."""
    activation = options.get("activation")
    mask = ["empty_like"] * (added and activation == "relu")
    forward = [*mask, "channel_stats", "allreduce_", "normalize"]
    backward = ["backward_reduce", "allreduce_", "backward_input"]
    for names in ranks.run(2, operators_on_rank, options, added):
        assert [name for name in names if name != "detach"] == forward + backward


@pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning")
def test_operations_keep_to_their_schema(backend: str) -> None:
    """What torch checks: mutations, aliases, fakes, and functionalization by a compiler."""
    x, residual, dy = torch.randn(3, 4, 3, 2, 5)
    x = x.contiguous(memory_format=torch.channels_last)
    weight, bias, running_mean, running_var = torch.rand(4, 3) + 0.5
    mask = torch.empty_like(x, dtype=torch.uint8)
    tracked = (running_mean, running_var, torch.tensor(0))

    moments = operations.channel_stats(x)
    torch.library.opcheck(operations.channel_stats, (x,))
    forward = (x, moments, weight, bias, *tracked, None, 1e-5, "relu", 0.01, residual, mask)
    _, stats = operations.normalize(*forward)
    torch.library.opcheck(operations.normalize, forward)
    epilogue = ("relu", 0.01, None, mask)
    reduce = (x, dy, stats, weight.dtype, None, weight, bias, *epilogue)
    sums, *_ = operations.backward_reduce(*reduce, wants_dz=True)
    torch.library.opcheck(operations.backward_reduce, reduce, {"wants_dz": True})
    torch.library.opcheck(operations.backward_input, (x, dy, stats, weight, sums, bias, *epilogue))
