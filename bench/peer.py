"""The machine code of the batch normalization kernels that torch ships, for the same figures.

A CUDA build of torch holds them in its CUDA library. Extraction (cuobjdump over that library) and
naming are apart from parsing, which `machine_code` does. The extraction ran on a cubin with kernels
of such names, and on no CUDA build of torch.
"""

import re
from pathlib import Path

import torch
from machine_code import Cost, costs_of_file, cuobjdump

# The start of a kernel's mangled name: what it does, its layout, and the dtype of the input, after
# the kind of variance that collect_statistics has as a first argument.
_NAME = re.compile(
    r"batch_norm_(collect_statistics|transform_input|backward_reduce|backward_elemt)"
    r"(_channels_last)?_kernelI(?:NS\d*_\d+(?:InvStd|Var)E)?(N3c108BFloat16E|N3c104HalfE|f|d)"
)
_KERNELS = {
    "collect_statistics": "channel_stats",
    "transform_input": "normalize",
    "backward_reduce": "backward_reduce",
    "backward_elemt": "backward_input",
}
_DTYPES = {
    "N3c108BFloat16E": "bfloat16",
    "N3c104HalfE": "float16",
    "f": "float32",
    "d": "float64",
}

Name = tuple[str, str, str]


def library() -> Path | None:
    """The CUDA library of the installed torch; None for a build without CUDA."""
    if torch.version.cuda is None:
        return None
    return Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"


def name_of(symbol: str) -> Name | None:
    """Our name for what a kernel of torch does, its layout and its dtype, if it is one of these."""
    found = _NAME.search(symbol)
    if not found:
        return None
    layout = "channels-last" if found[2] else "contiguous"
    return _KERNELS[found[1]], layout, _DTYPES[found[3]]


def entry_points(symbols: str) -> list[str]:
    """Names of the kernels in what ``cuobjdump -symbols`` printed, each once."""
    return list(dict.fromkeys(re.findall(r"^STT_FUNC\b.*STO_ENTRY\s+(\S+)", symbols, re.MULTILINE)))


def costs(path: Path, target: str) -> dict[Name, Cost]:
    """The cost of each kernel; of several instances, the one with the shortest loop per byte."""
    architecture = ("-arch", target)
    symbols = [
        s for s in entry_points(cuobjdump("-symbols", *architecture, str(path))) if name_of(s)
    ]
    return best(costs_of_file(path, *architecture, "-fun", ",".join(symbols)))


def best(costs: dict[str, Cost]) -> dict[Name, Cost]:
    """The instance of each kernel with the fewest instructions per byte that its loop loads."""
    by_name: dict[Name, Cost] = {}
    for symbol, cost in sorted(costs.items(), key=lambda item: _length(item[1])):
        if name := name_of(symbol):
            by_name.setdefault(name, cost)
    return by_name


def _length(cost: Cost) -> float:
    return cost.instructions_per_element(1) if cost.loop_load_bytes else float("inf")
