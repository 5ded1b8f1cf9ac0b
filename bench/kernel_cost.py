"""Compiles every kernel for GPUs that are not here, and prints what the machine code costs.

For each kernel, input and target: registers a thread, bytes spilled, and of the hot loop the
spills, the widest global load and store, and the instructions per element of x, counted from the
bytes that it loads, without those that a flat tile leaves idle. Where each program has one tile
there is no loop.

    python bench/kernel_cost.py --targets sm_90 gfx942 --dtypes bfloat16
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    sys.exit("TRITON_INTERPRET=1 is set: interpreted kernels are not compiled. Unset it.")

import machine_code
import stand_in
import torch
from syncbn_triton.kernels.launchers import (
    backward_input,
    backward_reduce,
    channel_stats,
    normalize,
)

# (N, C, *), large enough that reductions are split and every loop runs more than once.
INPUTS = {
    "contiguous": ((32, 64, 56, 56), torch.contiguous_format),
    "channels-last": ((32, 64, 56, 56), torch.channels_last),
    "2-D": ((65536, 256), torch.contiguous_format),
    "3-D": ((2, 32, 128, 128, 128), torch.contiguous_format),
    "channels-last 3-D": ((2, 32, 128, 128, 128), torch.channels_last_3d),
    "3 channels": ((32, 3, 224, 224), torch.contiguous_format),
    "3 channels, channels-last": ((32, 3, 224, 224), torch.channels_last),
    "24 channels, channels-last": ((32, 24, 112, 112), torch.channels_last),
    "40 channels, channels-last": ((64, 40, 56, 56), torch.channels_last),
    "72 channels, channels-last": ((64, 72, 56, 56), torch.channels_last),
    "65 channels, channels-last": ((8, 65, 17, 17, 17), torch.channels_last_3d),
    "rows of 784": ((64, 512, 28, 28), torch.contiguous_format),
    "rows of 196": ((256, 1024, 14, 14), torch.contiguous_format),
    "rows of 49": ((256, 2048, 7, 7), torch.contiguous_format),
    "rows of 20": ((30000, 64, 20), torch.contiguous_format),
    "long odd rows": ((32, 65, 57, 57), torch.contiguous_format),
    "small": ((2, 3, 5, 5), torch.contiguous_format),
}
DTYPES = ("bfloat16", "float16", "float32", "float64")
# Full-size tensors a kernel reads, and so what a loop's loads are divided among.
READS = {"channel_stats": 1, "normalize": 1, "backward_reduce": 2, "backward_input": 2}


def launch_all(x: torch.Tensor, affine: bool) -> None:
    """Launches the forward and the backward kernels on x, as the layer does."""
    C = x.shape[1]
    weight, bias = (x.new_empty(C), x.new_empty(C)) if affine else (None, None)
    running = (x.new_empty(C), x.new_empty(C), torch.tensor(0)) if affine else (None,) * 3
    dtypes = (x.dtype, x.dtype) if affine else (None, None)
    moments = channel_stats(x)
    _, stats = normalize(x, moments, weight, bias, *running, 0.1, 1e-5)
    sums, _, _ = backward_reduce(x, x, stats, *dtypes)
    backward_input(x, x, stats, weight, sums)


def costs(target: str, inputs: list[str], dtypes: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each kernel that each kind of input compiles."""
    driver = stand_in.install(target)
    for name, dtype in itertools.product(inputs, dtypes):
        driver.launches.clear()
        shape, memory_format = INPUTS[name]
        x = torch.empty(shape, dtype=getattr(torch, dtype))
        launch_all(x.contiguous(memory_format=memory_format), affine=name != "small")
        for launch in driver.launches:
            kernel = launch.name.removesuffix("_kernel")
            row = {"target": target, "kernel": kernel, "input": name, "dtype": dtype}
            yield row | figures(target, kernel, x.element_size(), launch)


def figures(target: str, kernel: str, itemsize: int, launch: stand_in.Launch) -> dict[str, Any]:
    """What the machine code says; for AMD, of which no disassembler ships, spills alone."""
    if not target.startswith("sm_"):
        return {"spilled": machine_code.spilled_by_hsaco(launch.binary)}
    cost = machine_code.cost_of_cubin(launch.binary)
    elements = cost.loop_load_bytes / itemsize / READS.get(kernel, 1)
    if tile := launch.constants.get("TILE"):
        elements *= tile.TILE_S / tile.BLOCK_S
    return {
        "registers": cost.registers,
        "spilled": cost.spilled,
        "loop_spills": cost.loop_spills,
        "load_bits": cost.load_bits,
        "store_bits": cost.store_bits,
        "instructions_per_element": round(cost.loop_instructions / elements, 1) if elements else 0,
    }


def main() -> None:
    """Prints a line for each compiled kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=stand_in.TARGETS, default=["sm_90"])
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    arguments = parser.parse_args()
    for target in arguments.targets:
        for row in costs(target, arguments.inputs, arguments.dtypes):
            print(json.dumps(row) if arguments.json else line(row))


def line(row: dict[str, Any]) -> str:
    """A row for people to read."""
    widths = {"target": 7, "kernel": 16, "input": 28, "dtype": 9}
    where = "".join(f"{row[key]:<{width}}" for key, width in widths.items())
    return where + ", ".join(f"{key} {row[key]}" for key in row if key not in widths)


if __name__ == "__main__":
    main()
