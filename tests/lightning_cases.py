"""A fit by Lightning, which starts this file once more for its second rank.

Arguments: the package Lightning comes from, and a file for the state that rank 0 ends with.
"""

import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, PER_STEP, EPOCHS = 24, 6, 2


def perceptron() -> nn.Sequential:
    """In the same state at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def samples() -> Tensor:
    torch.manual_seed(1)
    # Each sample apart from the others: a rank's own statistics are not those of all ranks.
    return torch.randn(SAMPLES, 3).double() + torch.arange(SAMPLES)[:, None]


def classifier(package: Any, seen: set[type]) -> Any:
    """A LightningModule of the package; adds the classes that its steps find to a set."""

    class Classifier(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron()

        def training_step(self, batch: list[Tensor]) -> Tensor:
            seen.update(type(layer) for layer in self.net)
            return self.net(batch[0]).square().mean()

        def train_dataloader(self) -> DataLoader:
            # The Trainer's own sampler would shuffle.
            data, share = TensorDataset(samples()), (self.trainer.world_size, self.global_rank)
            sampler = DistributedSampler(data, *share, shuffle=False)
            return DataLoader(data, batch_size=PER_STEP // share[0], sampler=sampler)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Classifier()


def fit(name: str, file: str) -> None:
    package = importlib.import_module(name)
    from syncbn_triton import SyncBatchNorm
    from syncbn_triton.lightning import TritonSyncBatchNorm

    seen: set[type] = set()
    model = classifier(package, seen)
    trainer = package.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        sync_batchnorm=True,
        plugins=[TritonSyncBatchNorm()],
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model)
    # Checked on both ranks: one that fails ends the other.
    assert trainer.world_size == 2
    assert SyncBatchNorm in seen
    assert nn.BatchNorm1d not in seen
    assert type(model.net[1]) is nn.BatchNorm1d
    if trainer.is_global_zero:
        torch.save(model.net.state_dict(), file)


if __name__ == "__main__":
    fit(*sys.argv[1:])
