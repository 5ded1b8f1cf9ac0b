"""`bench/gpu_tuning.py` reads the table that a run writes, also one that fails or is stopped."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import gpu_tuning
from gpu_table import summary


def test_tuning_reads_the_table_that_a_run_writes() -> None:
    entry = {"kernel": "normalize", "N": 1, "C": 2, "S": 3, "heuristic_us": 3.0, "tuned_us": 2.0}
    write = (
        "import os, pathlib\n"
        "folder = pathlib.Path(os.environ['SYNCBN_TRITON_CACHE'])\n"
        f"(folder / 'GPU.jsonl').write_text({json.dumps(entry)!r} + '\\n')\n"
    )
    for code, ok in ((write, True), (write + "raise SystemExit(3)", False), ("", False)):
        _, record = gpu_tuning.records((sys.executable, "-c", code), 30)
        assert record["ok"] == ok, record
    _, record = gpu_tuning.records((sys.executable, "-c", write), 30)
    assert "1.50 times" in list(summary("tuning", [record], None))[1]
    wait = "import time\nprint('half', flush=True)\ntime.sleep(60)"
    for code, ok in ((write + wait, True), (wait, False)):
        _, record = gpu_tuning.records((sys.executable, "-c", code), 1.5)
        assert record["ok"] == ok
        assert record["stopped"] == "after 1.5 s"
        assert "half" in record["output"]
