"""What a figure was taken on, and how it is spread. Imports little: ranks load it too."""

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch
from gpu_records import Record, figure
from torch import Tensor

BENCH = Path(__file__).parent


def conditions(device: str) -> Record:
    """The machine and the versions."""
    git = ["git", "-C", str(BENCH), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
    }


def cpu_name() -> str:
    """As Linux calls it, or the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def quartiles(values: Tensor) -> Record:
    """The median, and what half of the values lie between."""
    low, median, high = values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=values.dtype))
    marks = {"q1": low, "median": median, "q3": high}
    return {name: figure(mark.item()) for name, mark in marks.items()}


def spread(marks: Record) -> str:
    """The median, and the quartiles."""
    return "{median:.3g} ({q1:.3g} to {q3:.3g})".format(**marks)
