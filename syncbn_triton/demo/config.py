"""What a run of the demo consists of."""

import os
from dataclasses import dataclass

# Together scikit-learn's 1,797 digits.
TRAIN_IMAGES = 1400
HELD_OUT_IMAGES = 397


@dataclass(frozen=True)
class Config:
    """The command line's options."""

    world_size: int
    batch_per_rank: int
    epochs: int
    seed: int
    max_steps: int | None = None

    @property
    def global_batch(self) -> int:
        return self.world_size * self.batch_per_rank

    @property
    def steps_per_epoch(self) -> int:
        return TRAIN_IMAGES // self.global_batch

    @property
    def labels(self) -> dict[str, str]:
        """What each arm is, by its letter."""
        ranks = f"DDP {self.world_size} x {self.batch_per_rank} images"
        return {
            "a": f"(a) {ranks}, SyncBatchNorm",
            "b": f"(b) 1 x {self.global_batch} images, nn.BatchNorm2d",
            "c": f"(c) {ranks}, nn.BatchNorm2d",
        }


def started_by_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()
