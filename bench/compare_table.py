"""What `compare.py` writes of its records: JSON, CSV, Markdown, and a plot."""

import csv
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from contestants import ALONE, COMPILED, NATIVE, OURS, SQUARES, TORCH
from gpu_records import Record
from machine import spread
from matplotlib.figure import Figure

SPANS = ("forward", "backward", "both")
MARKS = ("q1", "median", "q3")
COLORS = {
    OURS: "#d95f02",
    ALONE: "#fdae6b",
    SQUARES: "#08306b",
    COMPILED: "#4daf4a",
    TORCH: "#984ea3",
}


def ratio(record: Record, who: str, span: str = "both") -> float:
    """A contestant's time in times of `nn.BatchNorm`'s."""
    times = record["times"]
    return times[who][span]["median"] / times[NATIVE][span]["median"]


def worlds(records: Iterable[Record]) -> dict[int, list[Record]]:
    """The records of each world."""
    found: dict[int, list[Record]] = {}
    for record in records:
        found.setdefault(record["world"], []).append(record)
    return found


def contestants(records: Iterable[Record]) -> list[str]:
    """All that were timed; some only on a few inputs."""
    return list({who: None for record in records for who in record["times"]})


def targets(records: list[Record]) -> Iterator[tuple[str, float, float]]:
    """What is asked for, what was found, and the most that it may be."""
    by_world = worlds(records)
    of_one, of_two = by_world.get(1, []), by_world.get(2, [])
    if of_one:
        found = statistics.geometric_mean(ratio(r, OURS) for r in of_one)
        yield "a world of one, geometric mean", found, 1.05
    if of_two:
        ratios = [ratio(r, ALONE) for r in of_two]
        found = statistics.geometric_mean(ratios)
        yield "synchronized path without its collectives, geometric mean", found, 1.15
        yield "synchronized path without its collectives, worst shape", max(ratios), 1.5
    to_squares = [ratio(r, OURS) / ratio(r, SQUARES) for r in records]
    yield "to the sum-of-squares layer, worst shape of all worlds", max(to_squares), 1.0


def markdown(result: Record) -> str:
    """Geometric means, targets, and a row for each shape."""
    records = result["records"]
    lines = [
        f"{result['device']}, {result['cpus']} CPUs, torch {result['torch']}, Python "
        f"{result['python']}, fp32, {result['date'][:10]}. A time is a median; a ratio is to "
        f"`{NATIVE}` in the same world; memory is the peak of a step in sizes of x.",
        "",
    ]
    for world, of_world in worlds(records).items():
        lines += [f"World of {world}, {len(of_world)} inputs:", "", *_means(of_world), ""]
    lines += ["| forward and backward, ratio | found | at most | |", "|---|---|---|---|"]
    for what, found, most in targets(records):
        verdict = "met" if found <= most else "**missed**"
        lines.append(f"| {what} | {found:.3f} | {most:g} | {verdict} |")
    for world, of_world in worlds(records).items():
        lines += ["", f"World of {world}, forward and backward, ms (quartiles):", ""]
        lines += _rows(of_world)
    return "\n".join(lines) + "\n"


def _means(records: list[Record]) -> Iterator[str]:
    yield "| geometric mean (worst) | forward | backward | both | memory |"
    yield "|---|---|---|---|---|"
    for who in contestants(records):
        timed = [r for r in records if who in r["times"]]
        cells = []
        for span in SPANS:
            ratios = [ratio(r, who, span) for r in timed]
            cells.append(f"{statistics.geometric_mean(ratios):.2f} ({max(ratios):.2f})")
        memory = [r["memory"][who] / r["bytes"] for r in timed]
        cells.append(f"{statistics.geometric_mean(memory):.2f} ({max(memory):.2f})")
        of = "" if len(timed) == len(records) else f", of {len(timed)} inputs"
        yield f"| {who}{of} | {' | '.join(cells)} |"


def _rows(records: list[Record]) -> Iterator[str]:
    names = contestants(records)
    yield f"| input | {' | '.join(names)} | ours : native |"
    yield "|---|" + "---|" * (len(names) + 1)
    for record in records:
        times = record["times"]
        cells = [spread(times[who]["both"]) if who in times else "" for who in names]
        yield f"| {label(record)} | {' | '.join(cells)} | {ratio(record, OURS):.2f} |"


def label(record: Record) -> str:
    """The size and, unless it is contiguous, the format."""
    size = " x ".join(str(n) for n in record["size"])
    return size if record["format"] == "contiguous" else f"{size}, last"


def write_json(path: Path, result: Record) -> None:
    """All that was found."""
    path.write_text(json.dumps(result, indent=1) + "\n")


def write_csv(path: Path, result: Record) -> None:
    """A line for each world, input and contestant."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = [f"{span}_{mark}_ms" for span in SPANS for mark in MARKS]
        writer.writerow(["world", "input", "format", "contestant", *columns, "ratio", "memory"])
        for r in result["records"]:
            size = "x".join(str(n) for n in r["size"])
            for who, times in r["times"].items():
                values = [times[span][mark] for span in SPANS for mark in MARKS]
                compared = [f"{ratio(r, who):.4f}", r["memory"][who]]
                writer.writerow([r["world"], size, r["format"], who, *values, *compared])


def draw(path: Path, result: Record) -> None:
    """Ratios of all inputs, a panel for each world and a line for each contestant."""
    by_world = worlds(result["records"])
    names = [name for name in COLORS if name in contestants(result["records"])]
    figure = Figure(figsize=(9, 1.3 + 0.4 * len(names)), layout="constrained")
    panels: Any = figure.subplots(1, len(by_world), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (world, records) in zip(panels, by_world.items(), strict=True):
        for line, who in enumerate(names):
            timed = [r for r in records if who in r["times"]]
            for last, face in ((False, COLORS[who]), (True, "none")):
                ratios = [ratio(r, who) for r in timed if (r["format"] != "contiguous") == last]
                style = {"facecolor": face, "edgecolor": COLORS[who], "linewidth": 0.8}
                axes.scatter(ratios, [line] * len(ratios), s=18, alpha=0.7, **style)
            if timed:
                mean = statistics.geometric_mean(ratio(r, who) for r in timed)
                axes.plot(mean, line, "|", color="black", markersize=16, markeredgewidth=2)
        axes.axvline(1, color="0.4", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_title(f"{world} process{'es' if world > 1 else ''}", fontsize="medium")
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    conditions = f"{result['device']}, {result['cpus']} CPUs, torch {result['torch']}, fp32"
    figure.supxlabel(
        f"time of forward and backward, in times of {NATIVE}'s; a dot is an input, hollow if "
        f"channels-last, a bar the geometric mean\n{conditions}, {result['date'][:10]}",
        fontsize="x-small",
        color="0.35",
    )
    figure.savefig(path, dpi=130)
