"""The demo's command line.

Imports of the ``demo`` extra wait until the options are read and the extra is found: the help needs
none of it, and who lacks it is told how to get it.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .config import TRAIN_IMAGES, Config, started_by_torchrun

EXTRA = ("sklearn", "matplotlib", "tqdm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit status, 0 only where (a) followed (b)."""
    config, out = _parse(arguments)
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f'The demo needs {", ".join(missing)}: pip install "syncbn-triton[demo]"',
            file=sys.stderr,
        )
        return 1

    from . import launch

    outcome = launch.run(config)
    if outcome is None:
        return 0

    from . import plot, report

    result = report.result(config, outcome)
    print(report.table(result))
    (out / "result.json").write_text(json.dumps(result, indent=2))
    plot.draw(result, out / "curves.png")
    print(f"Written: {out / 'result.json'}, {out / 'curves.png'}")
    return 0 if result["verdict"] == "passed" else 1


def _parse(arguments: Sequence[str] | None) -> tuple[Config, Path]:
    """The options, and the output folder, made now so that a bad one fails before training."""
    torchrun_ranks = int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else None
    parser = argparse.ArgumentParser(
        prog="python -m syncbn_triton.demo",
        description=(
            "Trains a small network on scikit-learn's digits three times, from the same weights "
            "and in the same order: (a) on several ranks with SyncBatchNorm, (b) in one process "
            "on the ranks' batches put together, with nn.BatchNorm2d, (c) on several ranks with "
            "nn.BatchNorm2d. Exits with 1 unless the losses of (a) follow those of (b)."
        ),
        epilog="Under torchrun each process is one of the ranks; otherwise they are started here.",
    )

    def add(option: str, kind: Callable[[str], Any], default: Any, text: str) -> None:
        parser.add_argument(option, type=kind, default=default, help=f"{text} (%(default)s)")

    add("--world-size", _integer(1), torchrun_ranks or 2, "number of ranks")
    add("--batch-per-rank", _integer(1), 4, "images in the batch of a rank")
    add("--epochs", _integer(1), 5, "passes over the training images")
    add("--seed", _integer(0), 0, "of the weights, the split and the order of the images")
    add("--out", Path, Path("demo-output"), "folder for result.json and curves.png")
    parser.add_argument(
        "--max-steps", type=_integer(1), help="cut each arm off after this many steps"
    )
    options = vars(parser.parse_args(arguments))
    out = options.pop("out")
    config = Config(**options)

    if torchrun_ranks not in (None, config.world_size):
        parser.error(f"--world-size {config.world_size} under torchrun, which has {torchrun_ranks}")
    if not 2 <= config.global_batch <= TRAIN_IMAGES:
        parser.error(
            f"expected 2 to {TRAIN_IMAGES} images a step "
            f"(got {config.world_size} x {config.batch_per_rank} images)"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    return config, out


def _integer(least: int) -> Callable[[str], int]:
    """A parser of integers from a least one up to what a seed may be."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} (got {text!r})")
        return int(text)

    return parse


if __name__ == "__main__":
    sys.exit(main())
