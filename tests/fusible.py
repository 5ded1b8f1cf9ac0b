"""Small networks of the usual shapes, with what they have after their batch norms, and steps."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncbn_triton import convert_sync_batchnorm


class Bottleneck(nn.Module):
    """As in ResNet: one activation module called three times, and a sum in place."""

    def __init__(self, c_in: int, c: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c)
        self.conv2 = nn.Conv2d(c, c, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(c)
        self.conv3 = nn.Conv2d(c, 2 * c, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(2 * c)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or c_in != 2 * c:
            self.downsample = nn.Sequential(
                nn.Conv2d(c_in, 2 * c, 1, stride, bias=False), nn.BatchNorm2d(2 * c)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Bottleneck(4, 3), Bottleneck(6, 3))
        self.layer2 = nn.Sequential(Bottleneck(6, 4, stride=2), Bottleneck(8, 4))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(x.mean((2, 3)))


class SqueezeExcitation(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.reduce, self.bn = nn.Conv2d(c, 4, 1), nn.BatchNorm2d(4)
        self.expand = nn.Conv2d(4, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        s = F.relu(self.bn(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * F.hardsigmoid(self.expand(s))


class InvertedResidual(nn.Module):
    """As in MobileNetV3: a sum without an activation."""

    def __init__(self, c: int, activation: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Sequential(nn.Conv2d(c, 2 * c, 1), nn.BatchNorm2d(2 * c), activation(inplace=True)),
            nn.Sequential(
                nn.Conv2d(2 * c, 2 * c, 3, padding=1, groups=2 * c), nn.BatchNorm2d(2 * c)
            ),
            SqueezeExcitation(2 * c),
            nn.Sequential(nn.Conv2d(2 * c, c, 1), nn.BatchNorm2d(c)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class RegNetBlock(nn.Module):
    """The last batch norm is two containers below the sum, on both sides."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(nn.Conv2d(c, c, 1), nn.BatchNorm2d(c))
        self.f = nn.Sequential(
            nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.SiLU()),
            nn.Sequential(nn.Conv2d(c, c, 1), nn.BatchNorm2d(c)),
        )
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.proj(x) + self.f(x))


class Functional(nn.Module):
    """Batch norm of what a function is given, and a forward given as a function of both."""

    def __init__(self, tail: Callable[[Tensor, Tensor], Tensor], c: int = 3) -> None:
        super().__init__()
        self.conv, self.norm, self.tail = nn.Conv2d(c, c, 1), nn.BatchNorm2d(c), tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.norm(self.conv(x)), x)


class Untraceable(nn.Module):
    """Chooses by the data; its containers are as simple as any."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.GELU())
        self.norm, self.relu = nn.BatchNorm2d(3), nn.ReLU()
        self.block = Bottleneck(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        return self.block(x) if x.sum() > 0 else x


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    # Layers fused, and those of them with a residual.
    "ResNet": (ResNet, 13, 4),
    "MobileNetV3": (
        lambda: nn.Sequential(
            *(InvertedResidual(3, act) for act in (nn.Hardswish, nn.ReLU, nn.ReLU6))
        ),
        5,
        0,
    ),
    "RegNet": (lambda: nn.Sequential(RegNetBlock(3), RegNetBlock(3)), 4, 2),
    "untraceable": (Untraceable, 4, 1),
}


def step(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """All that a step in training computes and changes, and the output in evaluation."""
    x = x.clone().requires_grad_()
    y = model.train()(x)
    # Weighted, as the mean of normalized values says nothing.
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    results = {"y": y.detach(), "dx": x.grad}
    results |= {f"grad {name}": p.grad for name, p in model.named_parameters()}
    results |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    results["evaluated"] = model.eval()(x).detach()
    model.zero_grad()
    return {name: result for name, result in results.items() if result is not None}


def images(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(size or (4, 3, 8, 8)), dtype=dtype)


def converted(model: nn.Module) -> nn.Module:
    return convert_sync_batchnorm(model.double())


def with_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def assert_same(
    ours: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-12
) -> None:
    """Equal but for the order of roundings in fp64."""
    assert ours.keys() == right.keys()
    largest = max(
        float(value.abs().amax()) for value in right.values() if value.is_floating_point()
    )
    for name, value in right.items():
        error = (ours[name] - value).abs().amax()
        assert error <= tolerance * largest, (
            f"{name}: error {error:.1e}, largest value {largest:.1e}"
        )
