"""Captures forward and backward of the layer in a CUDA graph, and compares replays with eager.

World of one. The graph is replayed with batches it has not seen; outputs, gradients and running
statistics must be those of a twin that runs eagerly, bit by bit.

    python bench/gpu_graphs.py
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_records import Record, attempt, emit
from torch import Tensor

from syncbn_triton import SyncBatchNorm

Step = Callable[[], list[Tensor]]
Capture = Callable[[Step], tuple[list[Tensor], Callable[[], None]]]

_LAST = torch.channels_last
CASES = {
    "contiguous": ((8, 64, 28, 28), torch.contiguous_format),
    "channels-last": ((8, 64, 28, 28), _LAST),
    "rows of 49": ((32, 64, 7, 7), torch.contiguous_format),
    "2-D": ((512, 96), torch.contiguous_format),
    "empty batch": ((0, 64, 28, 28), torch.contiguous_format),
}
DTYPES = (torch.bfloat16, torch.float32)
_REPLAYS = 3


def capture(step: Step) -> tuple[list[Tensor], Callable[[], None]]:
    """A step in a graph: the tensors it writes, and the function that replays it.

    Warmed up on a stream of its own, as torch asks for: kernels must be loaded before.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return outputs, graph.replay


def step_of(layer: SyncBatchNorm, x: Tensor, dy: Tensor) -> Step:
    """Forward and backward of a layer: y and all gradients."""

    def step() -> list[Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)]

    return step


def check(
    size: tuple[int, ...],
    memory_format: torch.memory_format,
    dtype: torch.dtype,
    device: torch.device,
    capture: Capture,
) -> Record:
    """Replays on new batches against eager steps on the same."""
    torch.manual_seed(0)

    def batch() -> Tensor:
        return torch.randn(size, device=device, dtype=dtype).contiguous(memory_format=memory_format)

    layer = SyncBatchNorm(size[1], device=device)
    twin = copy.deepcopy(layer)
    x, dy = batch().requires_grad_(), batch()
    outputs, replay = capture(step_of(layer, x, dy))
    # What warming up has counted.
    layer.load_state_dict(twin.state_dict())
    differing = set()
    for _ in range(_REPLAYS):
        with torch.no_grad():
            x.copy_(batch())
            dy.copy_(batch())
        replay()
        expected = step_of(twin, x, dy)()
        for name, ours, theirs in zip(("y", "dx", "dw", "db"), outputs, expected, strict=True):
            if not torch.equal(ours, theirs):
                differing.add(name)
        for (name, ours), theirs in zip(layer.named_buffers(), twin.buffers(), strict=True):
            if not torch.equal(ours, theirs):
                differing.add(name)
    return {"ok": not differing, "failed": sorted(differing)}


def records(device: torch.device, capture: Capture = capture) -> Iterator[Record]:
    """A record for each case."""
    yield {"expected": len(CASES) * len(DTYPES)}
    for name, case in CASES.items():
        for dtype in DTYPES:
            about = {"case": name, "dtype": str(dtype).removeprefix("torch.")}
            yield attempt(about, partial(check, *case, dtype, device, capture))


if __name__ == "__main__":
    emit(records(torch.device("cuda", torch.cuda.current_device())))
