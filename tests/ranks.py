"""A pool of processes that play the ranks of a gloo process group.

Starting a process costs seconds, so the pool lives as long as the test session. Each call sets up a
process group of its own, of as many ranks as it asks for, and tears it down. A rank that raises or
does not answer in time fails the call, and the pool starts over.
"""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=20)


class RankError(AssertionError):
    """A rank raised, or did not answer; carries its traceback."""


class RankPool:
    """Runs functions on several ranks at once."""

    def __init__(self) -> None:
        self._workers: list[tuple[mp.Process, Connection]] = []

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        backend: str = "aten",
        timeout: timedelta = TIMEOUT,
    ) -> list[Any]:
        """Calls ``function(rank, *arguments)`` on each rank and gathers the results.

        The function must be importable by name. ``backend`` is what ``SYNCBN_TRITON_BACKEND`` is
        set to.
        """
        call = (backend, timeout, function, arguments)
        answers = self._ask(world_size, *call)
        if any("connectFullMesh" in (error or "") for error, _ in answers):
            # gloo's ranks did not find each other in time, on a machine busy with something else.
            self.close()
            answers = self._ask(world_size, *call)
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(answers) if error]
        if errors:
            self.close()
            raise RankError("\n".join(errors))
        return [result for _, result in answers]

    def _ask(self, world_size: int, *call: Any) -> list[tuple[str | None, Any]]:
        """Each rank's error, or None, and result."""
        new = [_start() for _ in range(world_size - len(self._workers))]
        self._workers += new
        for _, pipe in new:
            pipe.recv_bytes()
        _, timeout, *_ = call
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder, "store"))
            for rank, (_, pipe) in enumerate(self._workers[:world_size]):
                pipe.send_bytes(pickle.dumps((rank, world_size, store, *call)))
            return [self._answer(rank, timeout) for rank in range(world_size)]

    def _answer(self, rank: int, timeout: timedelta) -> tuple[str | None, Any]:
        process, pipe = self._workers[rank]
        # The group's own timeout comes first, with a traceback that says where it waited.
        if not pipe.poll(timeout.total_seconds() + 10):
            return "no answer in time", None
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            process.join()
            return f"ended with exit code {process.exitcode}", None

    def close(self) -> None:
        """Ends all ranks."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()


def _start() -> tuple[mp.Process, Connection]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    # Started and imported: from here on, time counts.
    pipe.send_bytes(b"ready")
    while True:
        try:
            rank, world_size, store, backend, timeout, function, arguments = pickle.loads(
                pipe.recv_bytes()
            )
        except EOFError:
            return
        _choose_backend(backend)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timeout,
            )
            answer = (None, function(rank, *arguments))
        except Exception:
            answer = (traceback.format_exc(), None)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(answer))


def _choose_backend(backend: str) -> None:
    from syncbn_triton.backend import VARIABLE, backend_for

    os.environ[VARIABLE] = backend
    backend_for.cache_clear()
