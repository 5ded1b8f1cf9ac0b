"""What a kernel's machine code tells: registers, spills, access widths, the hot loop's length."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from triton import knobs


@dataclass(frozen=True)
class Cost:
    """Cost of one compiled kernel; widths in bits, loop figures of its hot loop."""

    registers: int
    spilled: int
    load_bits: int
    store_bits: int
    loop_spills: int
    loop_instructions: int
    loop_load_bytes: int


_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
_WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)\b")
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}


def cost_of_cubin(cubin: bytes) -> Cost:
    """Reads a cubin with the disassembler that Triton ships."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = _cuobjdump("--dump-resource-usage", str(path))
        sass = _cuobjdump("-sass", str(path))
    resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    code = [(int(m[1], 16), m[2]) for line in sass.splitlines() if (m := _INSTRUCTION.match(line))]
    loop = _hot_loop(code)
    return Cost(
        registers=int(resources["REG"]),
        spilled=int(resources["STACK"]) + int(resources["LOCAL"]),
        load_bits=max(_widths(loop, "LDG"), default=0),
        store_bits=max(_widths(loop, "STG"), default=0),
        loop_spills=sum(bool(re.search(r"\b(LDL|STL)\b", instruction)) for instruction in loop),
        loop_instructions=len(loop),
        loop_load_bytes=sum(_widths(loop, "LDG")) // 8,
    )


def spilled_by_hsaco(hsaco: bytes) -> int:
    """Registers an AMD code object spills, from its metadata note (MessagePack)."""
    spilled = 0
    for key in (b".vgpr_spill_count", b".sgpr_spill_count"):
        value = hsaco[hsaco.index(key) + len(key) :]
        # A positive fixint is its own value; 0xcc and 0xcd announce one and two bytes.
        size = {0xCC: 1, 0xCD: 2}.get(value[0], 0)
        spilled += int.from_bytes(value[1 : 1 + size], "big") if size else value[0]
    return spilled


def _cuobjdump(*arguments: str) -> str:
    command = [knobs.nvidia.cuobjdump.path, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _hot_loop(code: list[tuple[int, str]]) -> list[str]:
    """The loop, from a backward branch's target to it, that loads most for its length."""
    loops = []
    for position, instruction in code:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if target and int(target[1], 16) < position:
            loops.append([i for p, i in code if int(target[1], 16) <= p <= position])
    return max(loops, key=_intensity, default=[])


def _intensity(loop: list[str]) -> tuple[bool, int, float]:
    """Orders loops: over elements before over channels (fp64), wide loads before narrow."""
    widths = _widths(loop, "LDG")
    in_double = any(re.search(r"\bD(ADD|MUL|FMA)\b", instruction) for instruction in loop)
    return not in_double, max(widths, default=0), sum(widths) / len(loop)


def _widths(code: list[str], mnemonic: str) -> list[int]:
    """Bits that each of these accesses moves per thread."""
    widths = []
    for instruction in code:
        access = re.search(rf"\b{mnemonic}(\.\S+)?", instruction)
        if access:
            width = _WIDTH.search(access[0])
            widths.append(_BITS[width[1]] if width else 32)
    return widths
