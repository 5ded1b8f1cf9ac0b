"""Debug mode: before each synchronized call, ranks agree on which call it is.

A rank that skips a layer, or brings another number of channels, leaves the others waiting in a
collective, or worse, lets two collectives of different layers meet. With ``SYNCBN_TRITON_DEBUG=1``
every rank first posts the call it is about to make in the process group's store and reads what the
others posted, for at most ``SYNCBN_TRITON_DEBUG_TIMEOUT`` seconds (60 unless set).
"""

import os
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn

ENABLED = os.environ.get("SYNCBN_TRITON_DEBUG", "0") not in ("", "0")


@dataclass(frozen=True)
class Call:
    """What ranks must agree on."""

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


_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_innermost = ""
_calls_of_layer: Counter[str] = Counter()
_calls_in_group: Counter[str] = Counter()


def _note_module(module: nn.Module, inputs: object) -> None:
    """Before any module's forward: names all it holds, if new, and remembers which one runs."""
    global _innermost
    if module not in _names:
        # An outermost module is called first, so that names are those in the whole model.
        for name, child in module.named_modules():
            _names.setdefault(child, name or type(child).__name__)
    _innermost = _names[module]


if ENABLED:
    nn.modules.module.register_module_forward_pre_hook(_note_module)


def forward_call(x: Tensor, training: bool) -> Call:
    """The call that the module now running makes."""
    _calls_of_layer[_innermost] += 1
    number = _calls_of_layer[_innermost]
    return Call("forward", _innermost, number, x.shape[1], str(x.dtype)[6:], training)


def note_evaluation(x: Tensor) -> None:
    """Leaves word of a call that synchronizes with nobody, for ranks that wait in vain."""
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        store.set(_evaluation_key(dist.get_rank()), str(forward_call(x, training=False)))


def _evaluation_key(rank: int) -> str:
    return f"syncbn_triton/evaluation/{rank}"


def agree(call: Call, group: dist.ProcessGroup) -> None:
    """Returns once all ranks of a group are about to make the same call.

    Raises:
        RuntimeError: On every rank, if one is about to make another call, naming what differs; or
            on those that came, if one did not come in time.
    """
    store = dist.distributed_c10d._get_default_store()
    timeout = timedelta(seconds=float(os.environ.get("SYNCBN_TRITON_DEBUG_TIMEOUT", "60")))
    name, rank, ranks = group.group_name, dist.get_rank(), dist.get_process_group_ranks(group)
    number = _calls_in_group[name]
    _calls_in_group[name] += 1

    def key(number: int, rank: int) -> str:
        return f"syncbn_triton/{name}/{number}/{rank}"

    store.set(key(number, rank), str(call))
    try:
        store.wait([key(number, r) for r in ranks], timeout)
    except RuntimeError as error:
        absent = [r for r in ranks if not store.check([key(number, r)])]
        seconds = f"{timeout.total_seconds():g} s"
        listing = "\n".join(f"  rank {r}: {_last_evaluation(store, r)}" for r in absent)
        raise RuntimeError(
            f"rank {rank} waits in the {call}, and these ranks made no synchronized call within "
            f"{seconds}:\n{listing}"
        ) from error
    calls = {r: store.get(key(number, r)).decode() for r in ranks}
    if len(set(calls.values())) > 1:
        listing = "\n".join(f"  rank {r}: {text}" for r, text in calls.items())
        raise RuntimeError(f"ranks are about to make different synchronized calls:\n{listing}")
    if number:
        # All have read the call before, or they would not have come to this one.
        store.delete_key(key(number - 1, rank))


def _last_evaluation(store: Any, rank: int) -> str:
    key = _evaluation_key(rank)
    return f"last, the {store.get(key).decode()}" if store.check([key]) else "not heard of"
