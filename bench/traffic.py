"""Counts the bytes that interpreted kernels load and store.

Under ``TRITON_INTERPRET=1`` every load and store passes through Triton's interpreter, which sees
the address and the mask of each lane. A lane that is masked off moves nothing. Caches are unknown
to it: these are the bytes that kernels ask for. Atomics are not counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder


class Accesses:
    """The addresses of one kind of access, and the bytes that it moved."""

    def __init__(self) -> None:
        self._addresses: list[tuple[np.ndarray, int]] = []

    def record(self, pointers: Any, mask: Any) -> None:
        itemsize = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        self._addresses.append((pointers.data[mask.data], itemsize))

    @property
    def bytes(self) -> int:
        return sum(addresses.size * itemsize for addresses, itemsize in self._addresses)

    def of(self, x: Tensor) -> int:
        """Bytes moved in the memory of a dense tensor, which must still be alive."""
        first, last = x.data_ptr(), x.data_ptr() + x.nbytes
        return sum(
            int(((first <= addresses) & (addresses < last)).sum()) * itemsize
            for addresses, itemsize in self._addresses
        )


class Traffic:
    """What a block of code loaded and stored."""

    def __init__(self) -> None:
        self.loads, self.stores = Accesses(), Accesses()


@contextmanager
def count() -> Iterator[Traffic]:
    """Counts the loads and stores of the kernels that are interpreted within."""
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(self: Any, ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.loads.record(ptrs, mask)
        return load(self, ptrs, mask, *args, **kwargs)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        traffic.stores.record(ptrs, mask)
        return store(self, ptrs, value, mask, *args)

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counted_store),
    ):
        yield traffic
