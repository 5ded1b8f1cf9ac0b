"""The images and the network that all arms train on."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from .config import HELD_OUT_IMAGES


class Digits(NamedTuple):
    """Images ``(n, 1, 8, 8)`` in [0, 1], fp32, and their classes ``(n,)``."""

    images: Tensor
    classes: Tensor


def load(seed: int, device: torch.device) -> tuple[Digits, Digits]:
    """scikit-learn's handwritten digits, split at random: those to train on, those held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    classes = torch.tensor(digits.target, device=device)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed)).to(device)
    held_out, train = order[:HELD_OUT_IMAGES], order[HELD_OUT_IMAGES:]
    return Digits(images[train], classes[train]), Digits(images[held_out], classes[held_out])


class Network(nn.Module):
    """A residual network of ten batch norms, the last of which see 2x2 pixels per image.

    Its activations are smooth on purpose. With ReLU a rounding error that flips the sign of a value
    changes the gradient by a jump, and two runs of the same arithmetic drift apart within steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU()
        )
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.classifier = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        return self.classifier(features.mean((2, 3)))


class Block(nn.Module):
    """Two convolutions, each normalized, added to a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.residual(x) + self.shortcut(x))
