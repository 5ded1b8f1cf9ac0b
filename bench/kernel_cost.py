"""Compiles every kernel for GPUs that are not here, and prints what the machine code costs.

A line for each kernel, input and dtype, with the block sizes that are really chosen. Of the whole
kernel:

    regs    registers a thread
    spill   bytes spilled (registers on AMD)
    code    bytes of machine code

and for NVIDIA, of the hot loop, without the lanes that a flat tile leaves idle:

    load    bits of the widest load, and of the widest store
    ins/el  instructions per element of x
    B/el    bytes moved per element of x; not read from the code: what tests/test_traffic.py proves
    prog    programs resident on a multiprocessor: as many as fit, or as the grid has for each
    KiB/SM  bytes asked for and not yet used on a multiprocessor, by all of them
    A100    the share of that GPU's memory bandwidth that the instructions it can issue and the
            bytes in flight leave within reach, 1 at most; not a forecast

The stand-in for a driver has an H200's 132 multiprocessors on every target. Kernels that merge
partials have no loop over elements, and a "-" for its figures.

    python bench/kernel_cost.py --targets sm_90 gfx942 --dtypes bfloat16
    python bench/kernel_cost.py --suite --dtypes bfloat16 --json
    python bench/kernel_cost.py --dtypes bfloat16 --activations relu silu --residual
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

if os.environ.get("TRITON_INTERPRET") == "1":
    sys.exit("TRITON_INTERPRET=1 is set: interpreted kernels are not compiled. Unset it.")

import machine_code
import peer
import shapes
import stand_in
import torch
from syncbn_triton.kernels.epilogue import ACTIVATIONS, PIECEWISE_LINEAR, Epilogue
from syncbn_triton.kernels.launchers import (
    backward_input,
    backward_reduce,
    channel_stats,
    normalize,
)
from tqdm import tqdm

Inputs = dict[str, tuple[tuple[int, ...], torch.memory_format]]

# (N, C, *), large enough that reductions are split and every loop runs more than once.
INPUTS: Inputs = {
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
# Full-size tensors that a kernel reads and writes, as tests/test_traffic.py counts them.
READS = {"channel_stats": 1, "normalize": 1, "backward_reduce": 2, "backward_input": 2}
WRITES = {"channel_stats": 0, "normalize": 1, "backward_reduce": 0, "backward_input": 1}


class Fused(NamedTuple):
    """What follows in the same pass: an activation, and a residual that needs a gradient."""

    activation: str | None = None
    residual: bool = False

    @property
    def name(self) -> str:
        """What stands behind an input's name."""
        return "".join(
            f", {part}" for part in (self.activation, self.residual and "residual") if part
        )

    def bytes_moved(self, kernel: str, itemsize: int) -> tuple[int, int]:
        """Bytes per element of x that a kernel reads, and writes."""
        reads, writes = READS[kernel] * itemsize, WRITES[kernel] * itemsize
        if self.residual:
            mask = self.activation in PIECEWISE_LINEAR
            if kernel == "normalize":
                reads, writes = reads + itemsize, writes + mask
            elif kernel == "backward_reduce" and self.activation is not None:
                reads, writes = reads + (1 if mask else itemsize), writes + itemsize
        return reads, writes


PLAIN = Fused()


class GPU(NamedTuple):
    """Multiprocessors, clock in Hz, bytes a second, and bytes of shared memory of each SM."""

    sms: int
    clock: float
    bandwidth: float
    shared: int


# Data sheets of the A100 80GB, H100 and H200, SXM; the clock is the one of their FP32 peaks (19.5
# and 67 TFLOPS, at 64 and 128 fused multiply-adds per SM and cycle).
GPUS = {
    "sm_80": {"A100": GPU(108, 1.41e9, 2.04e12, 164 << 10)},
    "sm_90": {
        "H100": GPU(132, 1.98e9, 3.35e12, 228 << 10),
        "H200": GPU(132, 1.98e9, 4.8e12, 228 << 10),
    },
}
# Of each SM, compute capability 8.0 and 9.0 alike (CUDA C++ Programming Guide, technical
# specifications per compute capability): registers, which a warp takes in units of 256 from one of
# four parts; threads; programs, each with 1 KiB of shared memory for itself; lanes that issue.
_REGISTERS, _REGISTER_UNIT, _PARTS = 65536, 256, 4
_THREADS, _PROGRAMS, _SHARED_EACH, _LANES = 2048, 32, 1024, 128
# Seconds from a load to its use while memory is busy: assumed, about twice what an idle one takes.
_LATENCY = 600e-9


def suite() -> Inputs:
    """The inputs of `shapes`, in each of their memory formats."""
    return {
        shape.name + ("" if layout is torch.contiguous_format else ", channels-last"): (
            shape.size,
            layout,
        )
        for shape in shapes.SUITE
        for layout in shapes.formats(shape)
    }


def launch_all(x: torch.Tensor, affine: bool, activation: str | None, residual: bool) -> None:
    """Launches the forward and the backward kernels on x, as the layer does."""
    C = x.shape[1]
    weight, bias = (x.new_empty(C), x.new_empty(C)) if affine else (None, None)
    running = (x.new_empty(C), x.new_empty(C), torch.tensor(0)) if affine else (None,) * 3
    dtypes = (x.dtype, x.dtype) if affine else (None, None)
    epilogue, dz = Epilogue(activation, residual=x if residual else None), None
    if residual and activation in PIECEWISE_LINEAR:
        epilogue = epilogue._replace(mask=torch.empty_like(x, dtype=torch.uint8))
    moments = channel_stats(x)
    _, stats = normalize(x, moments, weight, bias, *running, 0.1, 1e-5, epilogue=epilogue)
    if residual and activation is not None:
        dz = torch.empty_like(x)
    backward = {"bias": bias, "epilogue": epilogue}
    sums, _, _ = backward_reduce(x, x, stats, *dtypes, weight=weight, **backward, dz=dz)
    if dz is None:
        backward_input(x, x, stats, weight, sums, **backward)
    else:
        backward_input(x, dz, stats, weight, sums)


def costs(
    target: str, inputs: Inputs, dtypes: list[str], epilogues: list[Fused]
) -> Iterator[list[dict[str, Any]]]:
    """For each input, dtype and epilogue, a row for each kernel that is launched."""
    driver = stand_in.install(target)
    for (name, (size, memory_format)), dtype, fused in itertools.product(
        inputs.items(), dtypes, epilogues
    ):
        driver.launches.clear()
        x = torch.empty(size, dtype=getattr(torch, dtype), memory_format=memory_format)
        launch_all(x, name != "small", *fused)
        where = {"target": target, "input": name + fused.name, "dtype": dtype}
        itemsize = x.element_size()
        yield [where | figures(target, itemsize, launch, fused) for launch in driver.launches]


def figures(
    target: str, itemsize: int, launch: stand_in.Launch, fused: Fused = PLAIN
) -> dict[str, Any]:
    """What the machine code of a launch says, and what follows for its GPUs."""
    kernel = launch.name.removesuffix("_kernel")
    if not target.startswith("sm_"):
        return {"kernel": kernel} | asdict(machine_code.cost_of_hsaco(launch.binary))
    cost = machine_code.cost_of_cubin(launch.binary)
    tile = launch.constants.get("TILE")
    used = tile.TILE_S / tile.BLOCK_S if tile else 1
    row = cost_figures(kernel, itemsize, cost, used, fused)
    for name, gpu in GPUS.get(target, {}).items():
        fit = resident(gpu, cost.registers, launch.num_warps, launch.shared)
        programs = min(fit, launch.grid[0] / gpu.sms)
        row["programs_per_sm"] = round(programs, 1)
        if "instructions_per_element" in row:
            in_flight = programs * launch.num_warps * 32 * cost.in_flight_bytes * used
            row["kib_in_flight_per_sm"] = round(in_flight / 1024, 1)
            instructions = row["instructions_per_element"] * max(1, gpu.sms / launch.grid[0])
            moved = fused.bytes_moved(kernel, itemsize)
            row[name] = round(share(gpu, *moved, instructions, in_flight), 2)
    return row


def cost_figures(
    kernel: str, itemsize: int, cost: machine_code.Cost, used: float = 1, fused: Fused = PLAIN
) -> dict[str, Any]:
    """The figures of a kernel's code, of whose lanes a part is used."""
    row = {
        "kernel": kernel,
        "registers": cost.registers,
        "spilled": cost.spilled,
        "code_bytes": cost.code_bytes,
        "loop_spills": cost.loop_spills,
    }
    if kernel not in READS or not cost.loop_load_bytes:
        return row
    reads, writes = fused.bytes_moved(kernel, itemsize)
    instructions = cost.instructions_per_element(reads) / used
    return row | {
        "load_bits": cost.load_bits,
        "store_bits": cost.store_bits,
        "instructions_per_element": round(instructions, 1),
        "bytes_per_element": reads + writes,
    }


def resident(gpu: GPU, registers: int, num_warps: int, shared: int) -> int:
    """Programs that fit on one multiprocessor."""
    of_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // _PARTS // of_warp * _PARTS // num_warps
    by_threads = _THREADS // (32 * num_warps)
    return min(_PROGRAMS, by_registers, by_threads, gpu.shared // (shared + _SHARED_EACH))


def share(gpu: GPU, reads: int, writes: int, instructions: float, in_flight: float) -> float:
    """Share of the memory bandwidth within reach: what binds, per element, is the longest time."""
    of_memory = (reads + writes) / gpu.bandwidth
    of_issue = instructions / (gpu.sms * _LANES * gpu.clock)
    # Little's law: bytes in flight are the rate of arrival times the latency.
    of_loads = reads * _LATENCY / (gpu.sms * in_flight)
    return of_memory / max(of_memory, of_issue, of_loads)


def peer_costs(target: str, dtypes: list[str]) -> list[dict[str, Any]]:
    """Rows of the kernels that torch ships for a target."""
    return [
        {"target": target, "input": f"torch, {layout}", "dtype": dtype}
        | cost_figures(kernel, getattr(torch, dtype).itemsize, cost)
        for (kernel, layout, dtype), cost in peer.costs(peer.library(), target).items()
        if dtype in dtypes
    ]


# For people: a column's title, alignment and width, and number format. Only the first few are known
# for AMD, and the last two only for a target in GPUS.
COLUMNS = {
    "input": ("input", "<38", ""),
    "dtype": ("dtype", "<8", ""),
    "kernel": ("kernel", "<15", ""),
    "registers": ("regs", ">4", ""),
    "spilled": ("spill", ">5", ""),
    "code_bytes": ("code", ">6", ""),
    "load_bits": ("load", ">4", ""),
    "store_bits": ("store", ">5", ""),
    "instructions_per_element": ("ins/el", ">6", ".1f"),
    "bytes_per_element": ("B/el", ">4", ""),
    "programs_per_sm": ("prog", ">4", ".1f"),
    "kib_in_flight_per_sm": ("KiB/SM", ">6", ".1f"),
}


def columns(target: str) -> dict[str, tuple[str, str, str]]:
    """The columns that a target has."""
    known = len(COLUMNS) if target in GPUS else -2 if target.startswith("sm_") else 6
    shares = {gpu: (gpu, ">5", ".2f") for gpu in GPUS.get(target, {})}
    return dict(list(COLUMNS.items())[:known]) | shares


def header(target: str) -> str:
    """What stands above a target's rows."""
    titles = " ".join(format(title, width) for title, width, _ in columns(target).values())
    return f"{target}\n{titles}"


def line(row: dict[str, Any]) -> str:
    """A row for people to read."""
    return " ".join(
        format(format(row[key], number) if key in row else "-", width)
        for key, (_, width, number) in columns(row["target"]).items()
    )


def main() -> None:
    """Prints a line for each compiled kernel."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=stand_in.TARGETS, default=["sm_90"])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--inputs", nargs="+", choices=INPUTS, default=list(INPUTS))
    which.add_argument("--suite", action="store_true", help="the inputs of bench/shapes.py")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--activations", nargs="+", choices=ACTIVATIONS, default=[None], help="fused with each"
    )
    parser.add_argument("--residual", action="store_true", help="fused, needing a gradient")
    parser.add_argument("--peer", action="store_true", help="torch's own kernels beside ours")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    arguments = parser.parse_args()
    if arguments.peer and not peer.library():
        parser.exit(2, f"--peer reads a CUDA build of torch, and this is {torch.__version__}.\n")
    show = json.dumps if arguments.json else line
    inputs = suite() if arguments.suite else {name: INPUTS[name] for name in arguments.inputs}
    epilogues = [Fused(activation, arguments.residual) for activation in arguments.activations]
    total = len(arguments.targets) * len(inputs) * len(arguments.dtypes) * len(epilogues)
    with tqdm(total=total, leave=False, disable=None) as bar:
        for target in arguments.targets:
            if not arguments.json:
                bar.write(header(target))
            for rows in costs(target, inputs, arguments.dtypes, epilogues):
                for row in rows:
                    bar.write(show(row))
                bar.update()
            if arguments.peer and target.startswith("sm_"):
                for row in peer_costs(target, arguments.dtypes):
                    bar.write(show(row))


if __name__ == "__main__":
    main()
