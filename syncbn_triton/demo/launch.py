"""Where the ranks come from: torchrun, or processes spawned here."""

import os
import pickle
import tempfile
from pathlib import Path

from torch.multiprocessing.spawn import spawn

from .config import Config, started_by_torchrun
from .train import Outcome, train_on_rank


def run(config: Config) -> Outcome | None:
    """Trains all arms, as one of torchrun's ranks or with ranks of its own.

    Returns:
        The outcome, or None on a rank of torchrun's other than 0.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A spawned rank raised this; the others were
            ended.
        torch.multiprocessing.ProcessExitedException: A spawned rank died; the others were ended.
    """
    if started_by_torchrun():
        rank = int(os.environ["RANK"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", config.world_size))
        return train_on_rank(config, rank, local_rank, local_world_size)
    with tempfile.TemporaryDirectory() as folder:
        # Ranks meet in a file rather than on a port, which another process could take first.
        spawn(_spawned, (config, Path(folder)), config.world_size)
        outcome: Outcome = pickle.loads(Path(folder, "outcome").read_bytes())
    return outcome


def _spawned(rank: int, config: Config, folder: Path) -> None:
    outcome = train_on_rank(config, rank, rank, config.world_size, f"file://{folder}/meeting-point")
    if outcome is not None:
        (folder / "outcome").write_bytes(pickle.dumps(outcome))
