"""What a run showed: a table for the eye, and all of it as data."""

import platform
from dataclasses import asdict
from typing import Any

import torch

from .. import __version__
from .config import Config
from .train import Outcome

# The steps in which (a) must follow (b), and how closely; in the long run rounding differences grow
# to any size. Measured: `--max-steps 50`, seeds 0 to 7, CPU: at most 2e-6.
COMPARED_STEPS = 50
TOLERANCE = 1e-4


def result(config: Config, outcome: Outcome) -> dict[str, Any]:
    """Everything that ``result.json`` holds."""
    losses = {
        letter: torch.tensor(arm.losses, dtype=torch.float64)
        for letter, arm in outcome.arms.items()
    }
    compared = min(COMPARED_STEPS, len(losses["b"]))
    largest_difference = {
        letter: (losses[letter] - losses["b"])[:compared].abs().max().item()
        for letter in ("a", "c")
    }
    return {
        "config": asdict(config),
        "versions": _versions(),
        "device": outcome.device,
        "backend": outcome.backend,
        "compared_steps": compared,
        "tolerance": TOLERANCE,
        "largest_difference": largest_difference,
        "verdict": "passed" if largest_difference["a"] <= TOLERANCE else "failed",
        "arms": {
            letter: {
                "label": config.labels[letter],
                "train_loss": losses[letter][-config.steps_per_epoch :].mean().item(),
                **asdict(arm),
            }
            for letter, arm in outcome.arms.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """The result in words and columns."""
    arms, difference = result["arms"].values(), result["largest_difference"]
    width = max(len(arm["label"]) for arm in arms)
    lines = [f"{'':{width}}  train loss, last epoch  held-out accuracy"]
    lines += [
        f"{arm['label']:{width}}  {arm['train_loss']:22.4f}  {arm['accuracy']:17.1%}"
        for arm in arms
    ]
    lines += [
        "",
        f"Largest difference in the first {result['compared_steps']} steps:",
        f"|loss(a) - loss(b)|  {difference['a']:.1e}",
        f"|loss(c) - loss(b)|  {difference['c']:.1e}",
        "",
        f"{result['verdict'].upper()}: (a) must follow (b) within {result['tolerance']:.0e}.",
    ]
    return "\n".join(lines)


def _versions() -> dict[str, str | None]:
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = None
    return {
        "syncbn_triton": __version__,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
    }
