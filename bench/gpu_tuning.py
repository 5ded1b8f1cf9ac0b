"""A short run of `autotune.py` on a GPU, into a table that is thrown away.

It is stopped when its time is over: what it has written until then counts.

python bench/gpu_tuning.py
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpu_records import Record, emit

# A long contiguous row and a flat tile.
COMMAND = (
    sys.executable,
    str(Path(__file__).with_name("autotune.py")),
    *("--shapes", "32,64,56,56", "32,2048,7,7"),
    *("--dtypes", "bfloat16"),
)
SECONDS = 100
_TAIL = 2000


def records(command: Sequence[str], seconds: float) -> Iterator[Record]:
    """One record: what was tuned, and by how much it is faster than what the heuristic chose."""
    yield {"expected": 1}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"SYNCBN_TRITON_CACHE": folder}
        try:
            run = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
            output, status = run.stdout, run.returncode
        except subprocess.TimeoutExpired as expired:
            # Each pair of kernels is written once it is tuned.
            output, status = expired.stdout or b"", None
        tables = sorted(Path(folder).rglob("*.jsonl"))
        entries = [json.loads(line) for path in tables for line in path.read_text().splitlines()]
    record: Record = {
        "ok": bool(entries) and status in (0, None),
        "entries": entries,
        "output": output.decode(errors="replace")[-_TAIL:],
    }
    if status is None:
        record["stopped"] = f"after {seconds:g} s"
    if not record["ok"]:
        record["error"] = f"exit status {status}, {len(entries)} entries written"
    yield record


if __name__ == "__main__":
    emit(records(COMMAND, SECONDS))
