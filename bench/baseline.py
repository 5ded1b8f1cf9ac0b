"""Compares a run of the benchmarks with the saved one, by ratios, which other machines share.

The ratio of a benchmark is its least time over that of `nn.BatchNorm` in the same group and run:
what disturbs a run only adds. A baseline keeps ratios alone. Nothing fails: a table is printed.

    make bench
    python bench/baseline.py bench/results/bench.json --save
"""

import argparse
import json
from pathlib import Path
from typing import Any

from machine import conditions

BASELINE = Path(__file__).with_name("baseline.json")
BASE = "nn.BatchNorm"
# Ratios of two quiet runs differ by less.
_NOTABLE = 1.25


def ratios(run: dict[str, Any]) -> dict[str, float]:
    """Ratios by group and contestant, of what pytest-benchmark wrote."""
    least: dict[str, dict[str, float]] = {}
    for benchmark in run["benchmarks"]:
        who = benchmark["params"]["who"]
        least.setdefault(benchmark["group"], {})[who] = benchmark["stats"]["min"]
    return {
        f"{group}: {who}": round(times[who] / times[BASE], 3)
        for group, times in least.items()
        if BASE in times
        for who in times
        if who != BASE
    }


def table(now: dict[str, float], before: dict[str, float]) -> list[str]:
    """A line for each ratio, then and now."""
    lines = [f"{'times that of ' + BASE:<62}{'saved':>9}{'now':>9}"]
    for name in sorted({**before, **now}):
        saved, found = before.get(name), now.get(name)
        cells = "".join("        -" if r is None else f"{r:9.3f}" for r in (saved, found))
        note = ""
        if saved and found:
            change = found / saved
            if max(change, 1 / change) > _NOTABLE:
                note = f"  {'slower' if change > 1 else 'faster'}, {change:.2f} times"
        lines.append(f"{name:<62}{cells}{note}")
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Prints the comparison, or saves the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="what --benchmark-json wrote")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--save", action="store_true", help="makes this run the baseline")
    options = parser.parse_args(arguments)
    now = ratios(json.loads(options.run.read_text()))
    if options.save:
        saved = {"conditions": conditions("cpu"), "ratios": now}
        options.baseline.write_text(json.dumps(saved, indent=1) + "\n")
        print(f"{len(now)} ratios saved in {options.baseline}")
        return
    before = {"ratios": {}}
    if options.baseline.exists():
        before = json.loads(options.baseline.read_text())
        print("saved on {device}, {cpus} CPUs, torch {torch}".format(**before["conditions"]))
    print("\n".join(table(now, before["ratios"])))


if __name__ == "__main__":
    main()
