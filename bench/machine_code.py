"""What a kernel's machine code tells: registers, spills, sizes, access widths, the hot loop."""

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from triton import knobs


@dataclass(frozen=True)
class Cost:
    """Cost of one compiled kernel; widths in bits, loop figures of its hot loop.

    ``loop_load_bytes`` is what a thread loads each time around, and ``in_flight_bytes`` the most of
    it that was asked for and not yet used.
    """

    registers: int
    spilled: int
    code_bytes: int
    load_bits: int
    store_bits: int
    loop_spills: int
    loop_instructions: int
    loop_load_bytes: int
    in_flight_bytes: int

    def instructions_per_element(self, bytes_read: float) -> float:
        """Of the hot loop, if an element takes so many bytes of its loads; 0 without a loop."""
        return self.loop_instructions * bytes_read / max(1, self.loop_load_bytes)


_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
# Volta and later: every instruction is 128 bits.
_INSTRUCTION_BYTES = 16
_WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128)\b")
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}


@lru_cache(maxsize=256)
def cost_of_cubin(cubin: bytes) -> Cost:
    """Reads a cubin of one kernel with the disassembler that Triton ships."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        (cost,) = costs_of_file(path).values()
    return cost


def costs_of_file(path: Path, *options: str) -> dict[str, Cost]:
    """Reads the kernels of a cubin, or those that options select from a library."""
    usage = cuobjdump("--dump-resource-usage", *options, str(path))
    return parse(usage, cuobjdump("-sass", *options, str(path)))


def parse(usage: str, sass: str) -> dict[str, Cost]:
    """The cost of each kernel, by name, in what cuobjdump printed about them."""
    codes = {}
    for function in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        name, text = function.split("\n", 1)
        codes[name.strip()] = [(int(m[1], 16), m[2]) for m in _INSTRUCTION.finditer(text)]
    found = re.findall(r"^\s*Function (\S+):\s*\n(.*)", usage, re.MULTILINE)
    return {name: _cost(resources, codes[name]) for name, resources in found if name in codes}


def _cost(usage: str, code: list[tuple[int, str]]) -> Cost:
    resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    loop = _hot_loop(code)
    return Cost(
        registers=int(resources["REG"]),
        spilled=int(resources["STACK"]) + int(resources["LOCAL"]),
        code_bytes=code[-1][0] + _INSTRUCTION_BYTES,
        load_bits=max(_widths(loop, "LDG"), default=0),
        store_bits=max(_widths(loop, "STG"), default=0),
        loop_spills=sum(bool(re.search(r"\b(LDL|STL)\b", instruction)) for instruction in loop),
        loop_instructions=len(loop),
        loop_load_bytes=sum(_widths(loop, "LDG")) // 8,
        in_flight_bytes=max(_in_flight(loop)) // 8,
    )


@dataclass(frozen=True)
class HsacoCost:
    """What an AMD code object says of itself; no disassembler for it ships with Triton."""

    registers: int
    spilled: int
    code_bytes: int


def cost_of_hsaco(hsaco: bytes) -> HsacoCost:
    """Reads the metadata note (MessagePack) and the section headers of an AMD code object."""
    spilled = _metadata(hsaco, b".vgpr_spill_count") + _metadata(hsaco, b".sgpr_spill_count")
    return HsacoCost(_metadata(hsaco, b".vgpr_count"), spilled, _executable_bytes(hsaco))


def _metadata(hsaco: bytes, key: bytes) -> int:
    value = hsaco[hsaco.index(key) + len(key) :]
    # A positive fixint is its own value; 0xcc and 0xcd announce one and two bytes.
    size = {0xCC: 1, 0xCD: 2}.get(value[0], 0)
    return int.from_bytes(value[1 : 1 + size], "big") if size else value[0]


def _executable_bytes(elf: bytes) -> int:
    """Bytes in the sections of a 64-bit ELF file that hold instructions."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    executable = 0x4
    return sum(length for _, _, flags, _, _, length in headers if flags & executable)


def cuobjdump(*arguments: str) -> str:
    """What the tool prints."""
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


def _in_flight(loop: list[str]) -> Iterator[int]:
    """Bits loaded and not yet used, at each place of two turns of a loop."""
    waiting: dict[int, tuple[range, int]] = {}
    yield 0
    for place, instruction in enumerate(loop * 2):
        named = {int(register) for register in re.findall(r"\bR(\d+)\b", instruction)}
        for load, (registers, _) in list(waiting.items()):
            if not named.isdisjoint(registers):
                del waiting[load]
        if widths := _widths([instruction], "LDG"):
            first = int(re.search(r"\bR(\d+)\b", instruction)[1])
            waiting[place] = range(first, first + max(1, widths[0] // 32)), widths[0]
        yield sum(width for _, width in waiting.values())


def _widths(code: list[str], mnemonic: str) -> list[int]:
    """Bits that each of these accesses moves per thread."""
    widths = []
    for instruction in code:
        access = re.search(rf"\b{mnemonic}(\.\S+)?", instruction)
        if access:
            width = _WIDTH.search(access[0])
            widths.append(_BITS[width[1]] if width else 32)
    return widths
