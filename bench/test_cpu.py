"""A step of the layer on the CPU beside one of `nn.BatchNorm`, and the parts of it.

make bench
"""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from gpu_peers import EPS, MOMENTUM, native
from pytest_benchmark.fixture import BenchmarkFixture

from syncbn_triton import SyncBatchNorm, aten

TINY = (2, 64, 4, 4)
SIZES = (TINY, (10, 64, 56, 56), (32, 512, 7, 7), (512, 2048))
FORMATS = {"contiguous": torch.contiguous_format, "last": torch.channels_last}
CASES = [
    pytest.param(size, FORMATS[name], id=f"{'x'.join(map(str, size))}-{name}")
    for size in SIZES
    for name in FORMATS
    if name == "contiguous" or len(size) == 4
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several would wait for each other wherever something else runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Forward and backward."""
    layer(x.detach().requires_grad_()).backward(dy)


@pytest.mark.parametrize("who", ["nn.BatchNorm", "ours"])
@pytest.mark.parametrize(("size", "memory_format"), CASES)
def test_step(
    benchmark: BenchmarkFixture, size: tuple[int, ...], memory_format: torch.memory_format, who: str
) -> None:
    x, dy = (torch.randn(size).contiguous(memory_format=memory_format) for _ in range(2))
    C = size[1]
    layer = SyncBatchNorm(C) if who == "ours" else native(C, len(size), CPU)
    benchmark.group = f"step {tuple(size)}, {str(memory_format).removeprefix('torch.')}"
    benchmark(partial(step, layer, x, dy))


@pytest.mark.parametrize("who", ["nn.BatchNorm", "pack", "pack and normalize"])
def test_packing(benchmark: BenchmarkFixture, who: str) -> None:
    """What ATen's two operations of forward cost where there is nearly nothing to compute."""
    x = torch.randn(TINY)
    layer = native(TINY[1], len(TINY), CPU)
    tracked = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    parameters = (layer.weight.detach(), layer.bias.detach())

    def pack_and_normalize() -> None:
        aten.normalize(x, aten.channel_stats(x), *parameters, *tracked, MOMENTUM, EPS)

    calls = {
        "nn.BatchNorm": partial(layer, x),
        "pack": partial(aten.channel_stats, x),
        "pack and normalize": pack_and_normalize,
    }
    benchmark.group = "forward of a tiny input, ATen"
    with torch.no_grad():
        benchmark(calls[who])
