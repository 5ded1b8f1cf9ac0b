"""A cost model fitted to what `scale.py` measured, and what is written of both.

With ``P`` ranks and ``n`` bytes of a rank's statistics, on rings as gloo's:

==========  ============  ======================
            steps         bytes sent by a rank
==========  ============  ======================
all-reduce  2 (P - 1)     2 n (P - 1) / P
all-gather  P - 1         n (P - 1)
==========  ============  ======================

``time = share * (alpha * steps + beta * bytes)``, where ``share = max(1, P / CPUs)``: ranks wait
for each other's CPU time. ``bytes on the wire = bytes + header * steps``. Chan et al. 2007,
"Collective communication: theory, practice, and experience", gives these costs, and those of trees,
of ``log2 P`` steps, as NCCL has them: an all-reduce by trees sends ``2 n`` in ``2 log2 P`` steps,
and no all-gather sends less than ``n (P - 1)``, in ``log2 P`` steps at best.
"""

import math
from pathlib import Path
from typing import Any

import torch
from gpu_records import Record, figure

MOST_RANKS = 4096
WHO = ("ours", "all-gather")
COLORS = {"ours": "#d95f02", "all-gather": "#08306b"}
# Of the all-gather's bytes in forward, with 16 ranks and 2048 channels.
TARGET = 1 / 3


def payload(who: str, direction: str, C: int) -> int:
    """Bytes of one rank's tensor."""
    return (8 if who == "ours" else 4) * (2 * C + (direction == "forward"))


def cost(who: str, direction: str, C: int, P: int, tree: bool = False) -> tuple[float, float]:
    """Steps, and bytes that a rank sends."""
    n = payload(who, direction, C)
    gathers = (who, direction) == ("all-gather", "forward")
    if tree:
        return math.log2(P) * (1 if gathers else 2), n * (P - 1) if gathers else 2 * n
    return (P - 1, n * (P - 1)) if gathers else (2 * (P - 1), 2 * n * (P - 1) / P)


def fit(records: list[Record], cpus: int) -> Record:
    """``alpha``, ``beta`` and ``header`` by least squares of relative errors, none negative."""
    rows, wire = [], []
    for r in records:
        steps, bytes_ = cost(r["who"], r["direction"], r["C"], r["ranks"])
        share, ms = max(1, r["ranks"] / cpus), r["ms"]["median"]
        rows.append((share * steps / ms, share * bytes_ / ms))
        wire.append((steps / r["bytes_per_rank"], 1 - bytes_ / r["bytes_per_rank"]))
    A = torch.tensor(rows, dtype=torch.float64)
    alpha, beta = _nonnegative(A)
    errors = (A @ torch.tensor([alpha, beta], dtype=A.dtype) - 1).abs()
    per_step, rest = torch.tensor(wire, dtype=A.dtype).unbind(1)
    return {
        "alpha_us": figure(alpha * 1e3),
        "beta_ns": figure(beta * 1e6),
        "header_bytes": figure(max(0.0, float(per_step @ rest / (per_step @ per_step)))),
        "median_error": figure(errors.median().item(), 2),
        "worst_error": figure(errors.max().item(), 2),
        "cpus": cpus,
    }


def _nonnegative(A: torch.Tensor) -> tuple[float, float]:
    """The two coefficients whose combination of A's columns is closest to ones."""
    ones = torch.ones(len(A), 1, dtype=A.dtype)
    alpha, beta = torch.linalg.lstsq(A, ones).solution.flatten().tolist()
    if alpha >= 0 and beta >= 0:
        return alpha, beta
    alone = [float(a.sum() / (a @ a)) for a in A.unbind(1)]
    return (0.0, alone[1]) if alpha < 0 else (alone[0], 0.0)


def predicted_ms(
    model: Record, who: str, C: int, P: int, cpus: int | None = None, tree: bool = False
) -> float:
    """Both directions; with a CPU for each rank unless there are so many."""
    costs = [cost(who, direction, C, P, tree) for direction in ("forward", "backward")]
    alpha, beta = model["alpha_us"] * 1e-3, model["beta_ns"] * 1e-6
    share = max(1, P / cpus) if cpus else 1
    return share * sum(alpha * steps + beta * bytes_ for steps, bytes_ in costs)


def predicted_bytes(model: Record, who: str, C: int, P: int) -> float:
    """Of forward, on the wire."""
    steps, bytes_ = cost(who, "forward", C, P)
    return bytes_ + model["header_bytes"] * steps


def markdown(result: Record) -> str:
    """A row for each world and number of channels, the target, and the model."""
    by_case: dict[tuple[int, int], dict[tuple[str, str], Record]] = {}
    for r in result["records"]:
        by_case.setdefault((r["C"], r["ranks"]), {})[r["who"], r["direction"]] = r
    where = "a network of its own" if result["own_network"] else f"`{result['interface']}`, shared"
    lines = [
        f"{result['device']}, {result['cpus']} CPUs, torch {result['torch']}, gloo, counted on "
        f"{where}, {result['date'][:10]}. KiB are sent by each rank; ms are medians (quartiles of "
        f"forward). More ranks than CPUs take turns on them.",
        "",
        "| C | ranks | forward KiB: ours | all-gather | ratio "
        "| both KiB: ours | all-gather | ratio "
        "| forward ms: ours | all-gather | both ms: ours | all-gather |",
        "|" + "---|" * 12,
    ]
    found = None
    for (C, ranks), cells in sorted(by_case.items()):
        forward = [cells[who, "forward"]["bytes_per_rank"] / 1024 for who in WHO]
        back = [cells[who, "backward"]["bytes_per_rank"] / 1024 for who in WHO]
        both = [a + b for a, b in zip(forward, back, strict=True)]
        times = [
            "{median:.3g} ({q1:.3g} to {q3:.3g})".format(**cells[w, "forward"]["ms"]) for w in WHO
        ]
        of_both = [sum(cells[w, d]["ms"]["median"] for d in ("forward", "backward")) for w in WHO]
        lines.append(
            f"| {C} | {ranks} | {_of_two(forward)} | {_of_two(both)} | {' | '.join(times)} | "
            + " | ".join(f"{ms:.3g}" for ms in of_both)
            + " |"
        )
        if (C, ranks) == (2048, 16):
            found = forward[0] / forward[1]
    if found is not None:
        verdict = "met" if found <= TARGET else "**missed**"
        lines += [
            "",
            f"Target: forward bytes per rank at 16 ranks and 2048 channels at most a third of the "
            f"all-gather's. Found {found:.3f}: {verdict}.",
        ]
    return "\n".join([*lines, "", *_about(result)]) + "\n"


def _of_two(values: list[float]) -> str:
    ours, theirs = values
    return f"{ours:.1f} | {theirs:.1f} | {ours / theirs:.2f}"


def _about(result: Record) -> list[str]:
    model = result["model"]
    lines = [
        "Model: alpha {alpha_us} us a step, beta {beta_ns} ns a byte, {header_bytes} bytes of "
        "headers a step; median error of a time {median_error:.0%}, worst {worst_error:.0%}. "
        "With a CPU for each rank, which was not measured:".format(**model),
        "",
        "| C | ranks | forward KiB: ours | all-gather | ring, both ms: ours | all-gather "
        "| tree, both ms: ours | all-gather |",
        "|" + "---|" * 8,
    ]
    for C in sorted({r["C"] for r in result["records"]}):
        for P in (64, 512, MOST_RANKS):
            sent = [predicted_bytes(model, who, C, P) / 1024 for who in WHO]
            ring, tree = (
                [predicted_ms(model, who, C, P, tree=by_tree) for who in WHO]
                for by_tree in (False, True)
            )
            cells = " | ".join(f"{value:.4g}" for value in (*sent, *ring, *tree))
            lines.append(f"| {C} | {P} | {cells} |")
    return lines


def draw(path: Path, result: Record) -> None:
    """Bytes and latency over the number of ranks: points are measured, lines are the model."""
    # Here, for ranks load this file and draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    panels: Any = figure.subplots(1, 2)
    _draw_bytes(panels[0], result)
    _draw_times(panels[1], result)
    last = max(r["ranks"] for r in result["records"])
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.axvspan(last, MOST_RANKS, color="0.95", zorder=0)
        axes.text(last * 1.1, 0.01, "not measured", transform=axes.get_xaxis_transform())
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    conditions = f"{result['device']}, {result['cpus']} CPUs, torch {result['torch']}, gloo"
    figure.supxlabel(f"{conditions}, {result['date'][:10]}", fontsize="small", color="0.35")
    figure.savefig(path, dpi=130)


def _powers(first: int) -> list[int]:
    return [2**i for i in range(int(math.log2(first)), int(math.log2(MOST_RANKS)) + 1)]


def _draw_bytes(axes: Any, result: Record) -> None:
    for who in WHO:
        for marker, C in zip("osD^", sorted({r["C"] for r in result["records"]}), strict=False):
            points = [
                (r["ranks"], r["bytes_per_rank"])
                for r in result["records"]
                if (r["who"], r["direction"], r["C"]) == (who, "forward", C)
            ]
            axes.plot(
                *zip(*points, strict=True), marker, color=COLORS[who], label=f"{who}, C = {C}"
            )
            sent = [predicted_bytes(result["model"], who, C, P) for P in _powers(2)]
            axes.plot(_powers(2), sent, "--", color=COLORS[who], linewidth=1)
    axes.set(title="forward; points measured, dashes modelled", ylabel="bytes sent by a rank")


def _draw_times(axes: Any, result: Record) -> None:
    model, records = result["model"], result["records"]
    C = max(r["C"] for r in records)
    measured = sorted({r["ranks"] for r in records})
    for who in WHO:
        color = COLORS[who]
        times = [
            sum(r["ms"]["median"] for r in records if (r["who"], r["C"], r["ranks"]) == (who, C, P))
            for P in measured
        ]
        axes.plot(measured, times, "o", color=color, label=f"{who}, measured")
        fitted = [predicted_ms(model, who, C, P, model["cpus"]) for P in measured]
        axes.plot(measured, fitted, "-", color=color, linewidth=1, label="model, these CPUs")
        for tree, style in ((False, "--"), (True, ":")):
            times = [predicted_ms(model, who, C, P, tree=tree) for P in _powers(2)]
            name = f"model, {'tree' if tree else 'ring'}, a CPU a rank"
            axes.plot(_powers(2), times, style, color=color, linewidth=1, label=name)
    axes.set(title=f"forward and backward, C = {C}", ylabel="ms")
