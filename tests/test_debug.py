"""Debug mode: ranks about to make different synchronized calls are told so, and others are not."""

import os
import re
import runpy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Event
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from debug_cases import (
    DISAGREEMENTS,
    Functional,
    Net,
    OtherNet,
    Repeated,
    normalize,
    synchronized,
    told,
    train,
)
from ranks import RankPool
from test_parity import check_step
from torch import Tensor

from syncbn_triton import convert_sync_batchnorm, debug

# For calls that wait in vain.
SHORT = {"SYNCBN_TRITON_DEBUG_TIMEOUT": "0.5"}


@pytest.fixture(scope="module")
def debug_ranks() -> Iterator[RankPool]:
    """Ranks in debug mode: they inherit the environment, and read it at import."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SYNCBN_TRITON_DEBUG", "1")
        environment.setenv("SYNCBN_TRITON_DEBUG_TIMEOUT", "10")
        pool = RankPool()
        yield pool
        pool.close()


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@pytest.mark.parametrize("split", [(1, 3), (2, 0, 1)], ids=str)
def test_r7_agreeing_ranks_compute_what_they_do_without(
    debug_ranks: RankPool, backend: str, split: tuple[int, ...]
) -> None:
    check_step(debug_ranks, backend, split, (3, 4), torch.float32, torch.contiguous_format)


def train_and_count_keys(rank: int, xs: Tensor) -> tuple[list[int], dict[str, Tensor]]:
    """Trains on one batch a step; the number of keys in the store after each."""
    model, keys = synchronized(Net().double(), ddp=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in xs:
        optimizer.zero_grad()
        model(x.split((1, 3))[rank]).square().sum().backward()
        optimizer.step()
        dist.barrier()
        keys.append(store().num_keys())
        dist.barrier()
    return keys, model.module.state_dict()


def test_r7_training_is_right_and_the_store_does_not_grow(debug_ranks: RankPool) -> None:
    xs = torch.randn(20, 4, 3, dtype=torch.float64)
    whole = Net().double()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for x in xs:
        optimizer.zero_grad()
        # DistributedDataParallel takes the mean over two ranks.
        (whole(x).square().sum() / 2).backward()
        optimizer.step()
    for keys, state in debug_ranks.run(2, train_and_count_keys, xs):
        assert set(keys) == {keys[0]}
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)


def train_in_turns(rank: int) -> None:
    models = [synchronized(model) for model in (Net(), OtherNet(), Repeated(), Functional())]
    for _ in range(2):
        for model in models:
            train(model)
        normalize(torch.randn(2, 3))


def test_r7_agreeing_ranks_may_call_several_models(debug_ranks: RankPool) -> None:
    debug_ranks.run(2, train_in_turns)


# The others are not one model over all ranks, or are told in the same way.
UNDER_DDP = ["layer skipped", "layer called once less", "layer in evaluation"]


def disagree(rank: int, case: str, ddp: bool) -> str:
    act, _ = DISAGREEMENTS[case]
    return error_of(lambda: act(rank, ddp))


@pytest.mark.parametrize(
    ("case", "ddp"),
    [*((case, False) for case in DISAGREEMENTS), *((case, True) for case in UNDER_DDP)],
)
def test_r7_a_disagreement_is_told_on_every_rank(
    debug_ranks: RankPool, case: str, ddp: bool
) -> None:
    """pytorch#44957, pytorch#78022."""
    _, told = DISAGREEMENTS[case]
    for error in debug_ranks.run(2, disagree, case, ddp):
        for text in told:
            assert re.search(text, error), error


# What rank 1 does instead of a step; where the others then wait, and what they are told of it.
ABSENCES: dict[str, tuple[Callable[[torch.nn.Module], object], tuple[str, str], str]] = {
    "does nothing": (
        lambda model: None,
        ("forward", "blocks.0.norm"),
        "rank 1: not heard of",
    ),
    "runs no backward": (
        lambda model: model(torch.randn(2, 3)),
        ("backward", "blocks.1.norm"),
        "rank 1: not heard of",
    ),
    "evaluates": (
        lambda model: model.eval()(torch.randn(2, 3)),
        ("forward", "blocks.0.norm"),
        told(1, "forward", "blocks.1.norm", 1, "3 channels of float32, evaluating"),
    ),
}


def wait_for_rank_one(rank: int, case: str, ddp: bool) -> str | None:
    model = synchronized(Net(), ddp)
    dist.barrier()
    if rank == 1:
        ABSENCES[case][0](model)
        return None
    with patch.dict(os.environ, SHORT):
        return error_of(lambda: train(model))


@pytest.mark.parametrize(
    ("case", "ddp"), [*((case, False) for case in ABSENCES), ("does nothing", True)]
)
def test_r7_a_rank_that_does_not_come_is_told_to_the_others(
    debug_ranks: RankPool, case: str, ddp: bool
) -> None:
    _, (direction, layer), last_of_rank_one = ABSENCES[case]
    for rank, error in enumerate(debug_ranks.run(3, wait_for_rank_one, case, ddp)):
        if rank != 1:
            assert f"rank {rank} waits in the {direction} of " in error
            assert re.search(rf"'[\w.]*{layer}'.* call 1, 3 channels of float32, training", error)
            assert "within 0.5 s" in error
            assert re.search(last_of_rank_one, error), error
            assert not re.search("rank [02]:", error), error


def give_up_on_rank_one(rank: int, step: Callable[[], object]) -> None:
    """Rank 0 waits for a step in vain, and only then does rank 1 go on."""
    if rank == 0:
        with patch.dict(os.environ, SHORT):
            error_of(step)
        store().set("rank 0 gave up", "")
    else:
        store().wait(["rank 0 gave up"])


def come_too_late(rank: int) -> str:
    model = synchronized(Net())
    give_up_on_rank_one(rank, lambda: train(model))
    error = ""
    if rank == 1:
        with patch.dict(os.environ, SHORT):
            error = error_of(lambda: train(model))
        store().set("rank 1 gave up", "")
    # Leaving would close the connections, an error of another kind.
    store().wait(["rank 1 gave up"], timedelta(seconds=15))
    return error


def test_r7_a_rank_that_comes_too_late_is_told_too(debug_ranks: RankPool) -> None:
    _, error = debug_ranks.run(2, come_too_late)
    assert "forward of " in error
    assert "blocks.0.norm" in error


def train_after_disagreement(rank: int, folder: Path) -> None:
    model = synchronized(Net())
    error_of(lambda: train(model, skip=rank == 1))
    train(model)


def train_after_absence(rank: int, folder: Path) -> None:
    model = synchronized(Net())
    give_up_on_rank_one(rank, lambda: train(model))
    train(model)


def train_in_a_new_process_group(rank: int, folder: Path) -> None:
    model = synchronized(Net())
    give_up_on_rank_one(rank, lambda: train(model))
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    train(model)


@pytest.mark.parametrize(
    "function", [train_after_disagreement, train_after_absence, train_in_a_new_process_group]
)
def test_r7_an_error_leaves_no_trace(
    debug_ranks: RankPool, function: Callable[[int, Path], None], tmp_path: Path
) -> None:
    debug_ranks.run(2, function, tmp_path)


def meet_without_a_store(rank: int) -> str:
    silent = Mock(wait=lambda *arguments: Event().wait())
    call = debug.forward_call(torch.randn(2, 3), training=True)
    with (
        patch.dict(os.environ, SYNCBN_TRITON_DEBUG_TIMEOUT="0.1"),
        patch.object(debug, "_STORE_TIMEOUT", 0.2),
        patch.object(debug, "_store", lambda: silent),
    ):
        return error_of(lambda: debug.agree(call, dist.group.WORLD))


def test_r7_a_store_out_of_reach_is_told(debug_ranks: RankPool) -> None:
    for rank, message in enumerate(debug_ranks.run(2, meet_without_a_store)):
        assert message.startswith(f"rank {rank} waits in the forward of 'no module', call ")
        assert "store did not answer within 0.3 s" in message


def train_on_rank_zero_first(rank: int) -> None:
    alone, *_ = [dist.new_group([r]) for r in range(2)]
    model = convert_sync_batchnorm(Net(), alone)
    if rank == 0:
        train(model)
    for block in model.blocks:
        block.norm.process_group = None
    train(model)


def evaluate_on_rank_zero_first(rank: int) -> None:
    model = synchronized(Net())
    if rank == 0:
        model.eval()(torch.randn(2, 3))
    train(model.train())


def evaluate_a_part_on_rank_zero_first(rank: int) -> None:
    model = synchronized(Net())
    if rank == 0:
        model.blocks[0].eval()(torch.randn(2, 3))
    train(model.train())


@pytest.mark.parametrize(
    "function",
    [train_on_rank_zero_first, evaluate_on_rank_zero_first, evaluate_a_part_on_rank_zero_first],
)
def test_r7_calls_that_synchronize_with_nobody_need_no_agreement(
    debug_ranks: RankPool, function: Callable[[int], None]
) -> None:
    debug_ranks.run(2, function)


def train_without_process_group(rank: int) -> None:
    dist.destroy_process_group()
    model = synchronized(Net())
    train(model)
    model.eval()(torch.randn(2, 3))


def test_r7_debug_mode_without_process_group(debug_ranks: RankPool) -> None:
    debug_ranks.run(1, train_without_process_group)


@pytest.mark.parametrize(("value", "hooks"), [(None, 0), ("", 0), ("0", 0), ("1", 1)])
def test_r7_off_nothing_is_registered(
    monkeypatch: pytest.MonkeyPatch, value: str | None, hooks: int
) -> None:
    name = "SYNCBN_TRITON_DEBUG"
    monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    registries = ["_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks"]
    for registry in registries:
        monkeypatch.setattr(torch.nn.modules.module, registry, OrderedDict())
    assert runpy.run_path(debug.__file__)["ENABLED"] == bool(hooks)
    registered = [len(getattr(torch.nn.modules.module, registry)) for registry in registries]
    assert any(registered) == bool(hooks)
