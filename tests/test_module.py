"""The public class: torch's arguments, attributes, state and errors."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_triton import SyncBatchNorm, sync_batch_norm

OPTIONS = [
    {},
    {"affine": False},
    {"bias": False},
    {"track_running_stats": False},
    {"eps": 1e-3, "momentum": None},
    {"dtype": torch.float64},
    {"device": "meta"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_is_built_like_torchs(options: dict[str, Any]) -> None:
    ours, torchs = SyncBatchNorm(3, **options), nn.SyncBatchNorm(3, **options)
    assert isinstance(ours, _BatchNorm)
    # DistributedDataParallel refuses CPU modules that hold torch's class.
    assert not isinstance(ours, nn.SyncBatchNorm)
    assert repr(ours) == repr(torchs)
    assert ours.process_group is None
    assert list(ours.state_dict()) == list(torchs.state_dict())
    for name, value in torchs.state_dict().items():
        assert ours.state_dict()[name].dtype == value.dtype
        assert ours.state_dict()[name].device == value.device
        if value.device.type != "meta":
            assert torch.equal(ours.state_dict()[name], value)


def test_takes_torchs_arguments_in_torchs_order() -> None:
    def arguments(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
        return [
            (p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()
        ]

    module = arguments(nn.SyncBatchNorm.__init__)
    assert arguments(SyncBatchNorm.__init__)[: len(module)] == module
    functional = arguments(nn.functional.batch_norm)
    assert arguments(sync_batch_norm)[: len(functional)] == functional


@pytest.mark.parametrize("other", [nn.SyncBatchNorm, nn.BatchNorm2d])
def test_state_loads_strictly_both_ways(other: type[nn.Module]) -> None:
    ours, theirs = SyncBatchNorm(3), other(3)
    with torch.no_grad():
        for i, tensor in enumerate(ours.state_dict().values()):
            tensor.fill_(i + 2)
    theirs.load_state_dict(ours.state_dict())
    restored = SyncBatchNorm(3)
    restored.load_state_dict(theirs.state_dict())
    for name, value in ours.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value)


def test_reset_parameters_without_bias() -> None:
    module = SyncBatchNorm(3, bias=False)
    nn.init.zeros_(module.weight)
    module.reset_parameters()
    assert module.weight.tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_evaluation_is_torchs_operator(dtype: torch.dtype) -> None:
    module = SyncBatchNorm(3)
    module(torch.randn(4, 3, 5))
    module.eval()
    x = torch.randn(4, 3, 5).to(dtype)
    exact = nn.functional.batch_norm(x.float(), module.running_mean, module.running_var)
    y = module(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, exact.to(dtype))
    assert module.num_batches_tracked == 1


def test_evaluation_without_running_statistics_uses_the_batch() -> None:
    module = SyncBatchNorm(3, track_running_stats=False).eval()
    x = torch.randn(4, 3, 5)
    exact = nn.functional.batch_norm(x.double(), None, None, training=True)
    torch.testing.assert_close(module(x).double(), exact, rtol=0, atol=1e-6)


def test_saved_tensors_notice_the_update_of_the_running_statistics(backend: str) -> None:
    module = SyncBatchNorm(3)
    x = torch.randn(4, 3, 5, requires_grad=True)
    module.eval()
    y = module(x)
    module.train()
    module(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_num_batches_tracked_counts_steps(backend: str) -> None:
    module = SyncBatchNorm(3)
    for _ in range(3):
        module(torch.randn(4, 3, 5))
    assert module.num_batches_tracked == 3


def test_cumulative_average(backend: str) -> None:
    ours, theirs = SyncBatchNorm(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    for _ in range(3):
        x = torch.randn(4, 3, 5)
        ours(x), theirs(x)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


# (exception, what its message tells, a call that raises it)
BAD_INPUT = {
    "one dimension": (ValueError, "at least 2D input .got 1D", lambda m: m(torch.randn(3))),
    "no channels": (ValueError, "non-zero number", lambda m: m(torch.randn(2, 0, 4))),
    "wrong channels": (
        ValueError,
        r"running_mean of shape \(5,\).*5 channels \(got \(3,\)\)",
        lambda m: m(torch.randn(2, 5, 4)),
    ),
    "integers": (
        NotImplementedError,
        "got torch.int64",
        lambda m: m(torch.ones(2, 3, 4, dtype=torch.int64)),
    ),
    "complex": (
        NotImplementedError,
        "got torch.complex64",
        lambda m: m(torch.ones(2, 3, 4, dtype=torch.complex64)),
    ),
    "other device": (
        RuntimeError,
        "same device, input is on meta and running_mean on cpu",
        lambda m: m(torch.ones(2, 3, 4, device="meta")),
    ),
    "short weight": (
        ValueError,
        r"weight of shape \(3,\)",
        lambda m: sync_batch_norm(torch.randn(2, 3, 4), None, None, torch.ones(2), training=True),
    ),
    "integer bias": (
        NotImplementedError,
        "bias of a floating dtype",
        lambda m: sync_batch_norm(
            torch.randn(2, 3, 4), None, None, None, torch.ones(3, dtype=torch.int64), training=True
        ),
    ),
    "half of the running statistics": (
        ValueError,
        "together",
        lambda m: sync_batch_norm(torch.randn(2, 3, 4), torch.ones(3), None, training=True),
    ),
    "cumulative average without a counter": (
        ValueError,
        "num_batches_tracked",
        lambda m: sync_batch_norm(
            torch.randn(2, 3, 4), torch.ones(3), torch.ones(3), training=True, momentum=None
        ),
    ),
    "group of others": (
        ValueError,
        r"rank \d is not in",
        lambda m: SyncBatchNorm(3, process_group=dist.GroupMember.NON_GROUP_MEMBER)(
            torch.randn(2, 3, 4)
        ),
    ),
}


def raise_on_rank(rank: int, case: str) -> None:
    """Makes a bad call, and checks that nothing was communicated or changed, then a good one."""
    exception, match, call = BAD_INPUT[case]
    module = SyncBatchNorm(3)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(exception, match=match):
        call(module)
    assert dist.group.WORLD._get_sequence_number_for_group() == 0
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    module(torch.randn(2, 3, 4)).sum().backward()
    assert module.num_batches_tracked == 1


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_raises_before_anything_is_communicated(ranks: RankPool, case: str) -> None:
    ranks.run(2, raise_on_rank, case)


def test_one_value_per_channel_in_a_world_of_one() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        SyncBatchNorm(3)(torch.randn(1, 3))


def reference_without_affine(x: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the whole batch, in float64."""
    x = x.double()
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


def step_without_affine(rank: int, xs: list[Tensor]) -> Tensor:
    return SyncBatchNorm(4, affine=False)(xs[rank])


def test_two_dimensional_input_without_affine(ranks: RankPool) -> None:
    """What a minimal layer does that all-reduces sums and sums of squares."""
    xs = torch.randn(12, 4).split((4, 8))
    ys = torch.cat(ranks.run(2, step_without_affine, xs))
    exact = reference_without_affine(torch.cat(xs))
    torch.testing.assert_close(ys.double(), exact, rtol=0, atol=1e-6)
