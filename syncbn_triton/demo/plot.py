"""The curves of a run, drawn from its result."""

from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Most steps that a drawn loss is averaged over; an eighth of a short run.
WINDOW = 50
# Smaller differences, among them those of 0, are drawn here.
FLOOR = 1e-9
COLORS = {"a": "#08306b", "b": "#9ecae1", "c": "#d95f02"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG: the training losses, and how far (a) and (c) are from (b)."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_losses(left, result["arms"])
    _draw_differences(right, result)
    for axes in (left, right):
        axes.legend(frameon=False, loc="upper right")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(_conditions(result), fontsize="small", color="0.35")
    figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, arms: dict[str, Any]) -> None:
    window = max(1, min(WINDOW, len(arms["b"]["losses"]) // 8))
    # (b) lies broad and pale under a dashed (a), so that both are seen where they coincide.
    styles: dict[str, dict[str, Any]] = {
        "a": {"linewidth": 1.5, "zorder": 3, "dashes": (4, 2)},
        "b": {"linewidth": 7, "zorder": 1, "solid_capstyle": "butt"},
        "c": {"linewidth": 1.5, "zorder": 2},
    }
    for letter, style in styles.items():
        losses = torch.tensor(arms[letter]["losses"]).unfold(0, window, 1).mean(1)
        steps = range(window, window + len(losses))
        axes.plot(steps, losses, color=COLORS[letter], label=arms[letter]["label"], **style)
    axes.set(
        title="Training loss",
        xlabel="step",
        ylabel=f"cross-entropy, running mean (window {window})",
        yscale="log",
    )


def _draw_differences(axes: Axes, result: dict[str, Any]) -> None:
    losses = {letter: torch.tensor(arm["losses"]) for letter, arm in result["arms"].items()}
    steps = range(1, len(losses["b"]) + 1)
    for letter in ("a", "c"):
        difference = (losses[letter] - losses["b"]).abs().clamp(min=FLOOR)
        axes.plot(
            steps,
            difference,
            ".",
            color=COLORS[letter],
            markersize=4,
            label=f"|loss({letter}) - loss(b)|",
        )
    compared, tolerance = result["compared_steps"], result["tolerance"]
    axes.plot(
        [1, compared],
        [tolerance, tolerance],
        color="black",
        linewidth=2,
        label=f"{tolerance:.0e}, the limit for (a) in the first {compared} steps",
    )
    axes.set(
        title="Distance from one process",
        xlabel="step",
        ylabel=f"difference in loss, {FLOOR:.0e} where smaller",
        yscale="log",
        ylim=(FLOOR / 2, 1e3),
    )


def _conditions(result: dict[str, Any]) -> str:
    config, versions = result["config"], result["versions"]
    return (
        f"{config['world_size']} ranks, {config['batch_per_rank']} images per rank, "
        f"seed {config['seed']}, {result['device']}, {result['backend']} backend, "
        f"syncbn_triton {versions['syncbn_triton']}, torch {versions['torch']}, "
        f"triton {versions['triton']}"
    )
