"""Cases of the host path that need real compilation; `test_host_path` runs them in a process.

Kernels are compiled for a GPU that is not here, and launches recorded.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatched import Operators
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import stand_in
from syncbn_triton.kernels import plan
from syncbn_triton.kernels.epilogue import Epilogue
from syncbn_triton.kernels.launchers import (
    backward_input,
    backward_reduce,
    channel_stats,
    normalize,
)
from triton.runtime.jit import JITFunction

KERNELS = ["channel_stats", "normalize", "backward_reduce", "backward_input"]
SPLIT_KERNELS = [*KERNELS[:1], "merge_moments", *KERNELS[1:3], "merge_gradients", *KERNELS[3:]]
INPUTS = {
    "small": ((2, 8, 4, 4), torch.contiguous_format, KERNELS),
    "split": ((16, 64, 56, 56), torch.contiguous_format, SPLIT_KERNELS),
    "channels-last": ((2, 8, 4, 4), torch.channels_last, KERNELS),
    "flat": ((2, 8, 7, 7), torch.contiguous_format, KERNELS),
}


@pytest.fixture
def driver() -> stand_in.StandInDriver:
    return stand_in.install("sm_90")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels launched through Triton's own binding and specialising."""
    names: list[str] = []
    run = JITFunction.run

    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        names.append(self.__name__.removesuffix("_kernel"))
        return run(self, *args, **options)

    monkeypatch.setattr(JITFunction, "run", recorded)
    return names


def step(x: Tensor, weight: Tensor | None = None) -> None:
    """Forward and backward of a layer on x."""
    tracked = (x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]), torch.tensor(0))
    moments = channel_stats(x)
    _, stats = normalize(x, moments, weight, weight, *tracked, 0.1, 1e-5)
    dtype = None if weight is None else weight.dtype
    sums, _, _ = backward_reduce(x, x, stats, dtype, dtype)
    backward_input(x, x, stats, weight, sums)


def recorded(driver: stand_in.StandInDriver) -> list[tuple[Any, ...]]:
    """What was launched since last asked, with dtypes and alignments for tensors."""
    launches = [
        (*launch[:-1], [(a.dtype, a.data_ptr() % 16) if isinstance(a, Tensor) else a for a in args])
        for launch in driver.launches
        for args in (launch.arguments,)
    ]
    driver.launches.clear()
    return launches


@pytest.mark.parametrize("name", INPUTS)
def test_a_kept_kernel_is_launched_as_triton_would(
    name: str, driver: stand_in.StandInDriver, bound: list[str]
) -> None:
    shape, memory_format, kernels = INPUTS[name]
    x = torch.empty(shape, dtype=torch.bfloat16).contiguous(memory_format=memory_format)
    weight = torch.empty(shape[1])
    step(x, weight)
    by_triton = recorded(driver)
    assert bound == kernels
    step(x, weight)
    assert recorded(driver) == by_triton
    assert bound == kernels


def test_what_a_pointer_is_specialised_on_picks_the_kernel(
    driver: stand_in.StandInDriver, bound: list[str]
) -> None:
    aligned = torch.empty(2, 8, 4, 4)
    misaligned = torch.empty(2 * 8 * 4 * 4 + 1)[1:].view(2, 8, 4, 4)
    weights = (None, torch.empty(8), torch.empty(9)[1:], torch.empty(8, dtype=torch.bfloat16))
    contestants = [(x, weight) for x in (aligned, misaligned) for weight in weights]
    first = []
    for x, weight in contestants:
        plan.forget_plans()
        step(x, weight)
        first.append(recorded(driver))
    plan.forget_plans()
    bound.clear()
    for x, weight in contestants:
        step(x, weight)
        recorded(driver)
    # The sums of x do not depend on a weight, and were kept the first time.
    assert bound.count("channel_stats") == 2
    assert bound.count("normalize") == len(contestants)
    bound.clear()
    for (x, weight), launches in zip(contestants, first, strict=True):
        step(x, weight)
        assert recorded(driver) == launches
    assert not bound


def test_a_kernel_specialised_on_more_is_not_kept(bound: list[str]) -> None:
    """On AMD, Triton compiles otherwise for storages below 2 GiB."""
    stand_in.install("gfx942")
    x = torch.empty(2, 8, 4, 4)
    step(x)
    step(x)
    assert bound == KERNELS * 2


@pytest.mark.parametrize("name", ["small", "split"])
def test_nothing_is_allocated_but_results(name: str, driver: stand_in.StandInDriver) -> None:
    """y, dx, statistics, gradients and packed tensors; and partial results where split."""
    shape, _, kernels = INPUTS[name]
    x, weight = torch.empty(shape), torch.empty(shape[1])
    moments = channel_stats(x)
    with Operators() as forward:
        channel_stats(x)
        _, stats = normalize(x, moments, weight, weight, None, None, None, 0.1, 1e-5)
    with Operators() as backward:
        sums, _, _ = backward_reduce(x, x, stats, torch.float32, torch.float32)
        backward_input(x, x, stats, weight, sums)
    split = len(kernels) > len(KERNELS)
    assert sorted(forward.names) == ["empty_like"] + ["new_empty"] * (2 + split)
    assert sorted(backward.names) == ["empty_like"] + ["new_empty"] * (3 + split)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_an_epilogue_allocates_nothing(
    activation: str | None, driver: stand_in.StandInDriver
) -> None:
    """Nor does it bring a value to the host: the mask and dz are given."""
    x, residual, weight = torch.empty(2, 8, 4, 4), torch.empty(2, 8, 4, 4), torch.empty(8)
    mask = torch.empty_like(x, dtype=torch.uint8) if activation == "relu" else None
    dz = None if activation is None else torch.empty_like(x)
    epilogue = Epilogue(activation, 0.01, residual, mask)
    tracked = (weight.clone(), weight.clone(), torch.tensor(0))
    moments = channel_stats(x)
    with Operators() as forward:
        _, stats = normalize(x, moments, weight, weight, *tracked, None, 1e-5, epilogue=epilogue)
    saved = epilogue._replace(residual=None if mask is not None else residual)
    with Operators() as backward:
        sums, _, _ = backward_reduce(
            x, x, stats, torch.float32, None, weight=weight, bias=weight, epilogue=saved, dz=dz
        )
        backward_input(x, x if dz is None else dz, stats, weight, sums)
    assert sorted(forward.names) == ["empty_like", "new_empty"]
    assert sorted(backward.names) == ["empty_like"] + ["new_empty"] * 3
