"""Debug mode: before each synchronized call, ranks agree on which call it is.

A rank that skips a layer, or brings another number of channels, leaves the others waiting in a
collective, or worse, lets two collectives of different layers meet. With ``SYNCBN_TRITON_DEBUG=1``
every rank first posts the call it is about to make in the process group's store and reads what the
others posted, for at most ``SYNCBN_TRITON_DEBUG_TIMEOUT`` seconds (60 unless set).
"""

import os
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

ENABLED = os.environ.get("SYNCBN_TRITON_DEBUG", "0") not in ("", "0")
# Seconds for the store itself to answer, on top of those for the other ranks.
_STORE_TIMEOUT = 10.0


@dataclass(frozen=True)
class Call:
    """What ranks must agree on; ``number`` counts the synchronized calls of one layer."""

    direction: str
    layer: str
    number: int
    channels: int
    dtype: str
    training: bool

    def __str__(self) -> str:
        state = "training" if self.training else "evaluating"
        return (
            f"{self.direction} of {self.layer!r}, call {self.number}, "
            f"{self.channels} channels of {self.dtype}, {state}"
        )


class _NoModule:
    """Stands for the module of a call that is made outside any."""


_NO_MODULE = _NoModule()
# Modules whose forward runs now, outermost first, and the names of all that the outermost holds.
_running: list[nn.Module] = []
_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
# What has been agreed on so far. A call that failed counts for nobody.
_calls_of_module: WeakKeyDictionary[object, int] = WeakKeyDictionary()
_calls_in_group: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def _enter(module: nn.Module, inputs: object) -> None:
    if not _running:
        _names.clear()
        root = type(module).__name__
        for name, child in module.named_modules():
            _names[child] = f"{root}.{name}" if name else root
    _running.append(module)


def _leave(module: nn.Module, inputs: object, output: object) -> None:
    _running.pop()


if ENABLED:
    nn.modules.module.register_module_forward_pre_hook(_enter)
    nn.modules.module.register_module_forward_hook(_leave, always_call=True)


def _caller() -> object:
    return _running[-1] if _running else _NO_MODULE


def forward_call(x: Tensor, training: bool) -> Call:
    """The call that the module now running makes."""
    caller = _caller()
    if isinstance(caller, nn.Module):
        layer = _names.get(caller, type(caller).__name__)
    else:
        layer = "no module"
    number = _calls_of_module.get(caller, 0) + 1
    return Call("forward", layer, number, x.shape[1], str(x.dtype)[6:], training)


def note_evaluation(x: Tensor) -> None:
    """Leaves word of a call that synchronizes with nobody, for ranks that wait in vain."""
    if dist.is_initialized():
        _store().set(_evaluation_key(dist.get_rank()), str(forward_call(x, training=False)))


def agree(call: Call, group: dist.ProcessGroup) -> None:
    """Returns once all ranks of a group are about to make the same call.

    Raises:
        RuntimeError: On every rank, if one is about to make another call, naming what differs; or
            on those that came, if one did not come in time, or the store does not answer.
    """
    # The store's client waits for its host for good, also once a link between them is cut.
    agreed: Future[None] = Future()
    Thread(target=_settle, args=(agreed, call, group), daemon=True).start()
    seconds = _timeout().total_seconds() + _STORE_TIMEOUT
    try:
        agreed.result(seconds)
    except FutureTimeoutError:
        raise RuntimeError(
            f"rank {dist.get_rank()} waits in the {call}, and the process group's store did not "
            f"answer within {seconds:g} s: its host cannot be reached"
        ) from None


def _settle(agreed: Future[None], call: Call, group: dist.ProcessGroup) -> None:
    """Hands the end of the comparison, or its error, to the thread that waits for it."""
    try:
        _compare(call, group)
    except Exception as error:
        agreed.set_exception(error)
    else:
        agreed.set_result(None)


def _compare(call: Call, group: dist.ProcessGroup) -> None:
    """Posts this rank's call, and raises unless all ranks post the same in time."""
    store, rank, ranks = _store(), dist.get_rank(), dist.get_process_group_ranks(group)
    number = _calls_in_group.get(group, 0)
    prefix = f"syncbn_triton/{group.group_name}"
    post = f"{prefix}/{number}/{{}}"
    store.set(post.format(rank), str(call))
    _await(call, post, rank, ranks)
    calls = {r: store.get(post.format(r)).decode() for r in ranks}
    _calls_in_group[group] = number + 1
    if len(set(calls.values())) > 1:
        notes = {r: f"; {note}" if (note := _last_evaluation(r)) else "" for r in ranks}
        listing = "\n".join(f"  rank {r}: {calls[r]}{notes[r]}" for r in ranks)
        raise RuntimeError(f"ranks are about to make different synchronized calls:\n{listing}")
    if call.direction == "forward":
        _calls_of_module[_caller()] = call.number
    store.delete_key(_evaluation_key(rank))
    # All have read the call before, or they would not have come to this one.
    store.delete_key(f"{prefix}/{number - 1}/{rank}")


def _await(call: Call, post: str, rank: int, ranks: list[int]) -> None:
    """Waits until all ranks have posted, or withdraws this rank's post and raises."""
    store, timeout = _store(), _timeout()
    try:
        store.wait([post.format(r) for r in ranks], timeout)
    except RuntimeError as error:
        withdrawn = f"{post}/withdrawn"
        absent = [
            r for r in ranks if not any(store.check([k.format(r)]) for k in (post, withdrawn))
        ]
        store.set(withdrawn.format(rank), "")
        store.delete_key(post.format(rank))
        listing = "\n".join(f"  rank {r}: {_last_evaluation(r) or 'not heard of'}" for r in absent)
        raise RuntimeError(
            f"rank {rank} waits in the {call}, and these ranks made no synchronized call within "
            f"{timeout.total_seconds():g} s:\n{listing}"
        ) from error


def _last_evaluation(rank: int) -> str:
    """A call that synchronized with nobody, if a rank made one since its last that did."""
    key = _evaluation_key(rank)
    return f"last, the {_store().get(key).decode()}" if _store().check([key]) else ""


def _evaluation_key(rank: int) -> str:
    return f"syncbn_triton/evaluation/{rank}"


def _timeout() -> timedelta:
    return timedelta(seconds=float(os.environ.get("SYNCBN_TRITON_DEBUG_TIMEOUT", "60")))


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
