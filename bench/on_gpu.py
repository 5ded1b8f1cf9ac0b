"""Measures on a GPU what this project claims: right, fast, capturable, synchronized, tunable.

No GPU has run it yet: its parts have run on a CPU, with the kernels interpreted and torch's GPU
operators replaced by stand-ins.

======  ==========================================================================================
parity  the real kernels against the float64 oracle, by dtype
graphs  CUDA graphs of forward and backward, replayed
ranks   two ranks on this GPU over gloo, against the oracle
speed   kernels and layer against torch's and a copy, over the sizes of `shapes.py`
tuning  a short run of `autotune.py`
======  ==========================================================================================

Each part is a script of its own, ``gpu_<part>.py``, in processes of its own, with a time limit; all
together stay under eight minutes. What they found is written to one JSON file after each of them.
The exit status is 1 if a part failed, and 2 without a GPU.

    python bench/on_gpu.py --parts parity speed
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from gpu_records import Record, parse
from gpu_table import summary
from tqdm import tqdm

BENCH = Path(__file__).parent
# All parts together.
SECONDS = 470
_POLL = 0.2
_TAIL = 4000


class Part(NamedTuple):
    """Scripts that run at one time, and the seconds they may take."""

    commands: tuple[tuple[str, ...], ...]
    seconds: float


_DTYPES = ("float16", "bfloat16", "float32", "float64")
PARTS = {
    "parity": Part(tuple(("gpu_parity.py", dtype) for dtype in _DTYPES), 150),
    "graphs": Part((("gpu_graphs.py",),), 50),
    "ranks": Part((("gpu_ranks.py",),), 90),
    "speed": Part((("gpu_speed.py",),), 220),
    "tuning": Part((("gpu_tuning.py",),), 110),
}


def run_part(name: str, part: Part, seconds: float) -> Record:
    """Runs a part in processes of its own, and gathers what it found until then."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"{i}.out") for i in range(len(part.commands))]
        processes: list[subprocess.Popen] = []
        try:
            for command, output in zip(part.commands, outputs, strict=True):
                processes.append(_start(command, output, folder))
            _wait(name, processes, outputs, start + min(seconds, part.seconds))
            statuses = [process.poll() for process in processes]
        finally:
            for process in processes:
                _end(process)
        records = [r for output in outputs for r in parse(output.read_text(errors="replace"))]
        expected = sum(r.get("expected", 0) for r in records)
        records = [r for r in records if "expected" not in r]
        errors = []
        for command, output, status in zip(part.commands, outputs, statuses, strict=True):
            if status != 0:
                how = "not done in time" if status is None else f"exit status {status}"
                tail = output.with_suffix(".err").read_text(errors="replace")[-_TAIL:]
                errors.append({"command": list(command), "error": how, "stderr": tail})
    passed = not errors and bool(records) and all(r.get("ok", True) for r in records)
    return {
        "ok": passed,
        "seconds": round(time.monotonic() - start, 1),
        "expected": expected,
        "errors": errors,
        "records": records,
    }


def _start(command: tuple[str, ...], output: Path, cache: str) -> subprocess.Popen:
    """Starts a script without the options of this shell, and with no table of tuned blocks."""
    ours = ("SYNCBN_TRITON_", "TRITON_INTERPRET")
    environment = {n: v for n, v in os.environ.items() if not n.startswith(ours)}
    environment["SYNCBN_TRITON_CACHE"] = cache
    script, *arguments = command
    with output.open("wb") as out, output.with_suffix(".err").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, str(BENCH / script), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def _wait(name: str, processes: list, outputs: list[Path], deadline: float) -> None:
    """Waits for all, and shows how many records there are."""
    with tqdm(desc=name, unit="case", leave=False) as bar:
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(_POLL)
            records = [r for output in outputs for r in parse(output.read_text(errors="replace"))]
            bar.total = sum(r.get("expected", 0) for r in records) or None
            bar.n = sum("ok" in r for r in records)
            bar.refresh()


def _end(process: subprocess.Popen) -> None:
    """Ends a script and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def describe(device: int) -> Record:
    """The machine and the versions."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        or _output("rocm-smi", "--showdriverversion"),
        "runtime": f"HIP {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "commit": _output("git", "-C", str(BENCH), "rev-parse", "HEAD"),
        "changed": _output("git", "-C", str(BENCH), "status", "--porcelain", "-uno"),
    }


def conditions() -> str | None:
    """Clocks, power and temperature at this moment."""
    fields = "pstate,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,utilization.gpu"
    return _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv") or _output(
        "rocm-smi", "--showclocks", "--showpower", "--showtemp"
    )


def _output(*command: str) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return run.stdout.strip()


def write(path: Path, result: dict[str, Any]) -> None:
    """Replaces the file at once: an interrupted write loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


def report(name: str, found: Record, parts: dict[str, Record]) -> None:
    """Prints what a part found."""
    trusted = parts["parity"]["ok"] if "parity" in parts else None
    for line in summary(name, found["records"], trusted):
        print(line)
    missing = found["expected"] - sum("ok" in r for r in found["records"])
    if missing > 0:
        print(f"  {missing} were not reached")
    for error in found["errors"]:
        print(f"  FAILED {' '.join(error['command'])}: {error['error']}")
        print("".join(f"    {line}\n" for line in error["stderr"].splitlines()[-8:]), end="")
    print(f"  {found['seconds']} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--results", type=Path, default=BENCH / "results", help="folder for JSON")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            f"on_gpu.py needs a GPU, and torch {torch.__version__} sees none here: nothing was "
            "measured.",
            file=sys.stderr,
        )
        return 2
    start, now = time.monotonic(), datetime.now(timezone.utc)
    result = {"date": now.isoformat(timespec="seconds"), **describe(torch.cuda.current_device())}
    parts: dict[str, Record] = {}
    result |= {"before": conditions(), "parts": parts}
    device = "-".join(result["device"].split())
    path = options.results / f"{now:%Y-%m-%dT%H%M%S}_{device}.json"
    print(f"{result['device']}, torch {result['torch']}, triton {result['triton']}", flush=True)
    # In the order of PARTS: what is wrong is not to be called fast.
    for name in (name for name in PARTS if name in options.parts):
        parts[name] = run_part(name, PARTS[name], SECONDS - (time.monotonic() - start))
        result["after"] = conditions()
        write(path, result)
        report(name, parts[name], parts)
    failed = [name for name, found in parts.items() if not found["ok"]]
    print(f"{path}\n{'failed: ' + ', '.join(failed) if failed else 'all parts passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
