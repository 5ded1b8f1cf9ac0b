"""What cannot be fused is left as it is, and the report says why."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fusible import Functional, converted, images, step, with_hook
from torch import Tensor, nn
from torch.nn.utils import parametrize

from syncbn_triton import FusionReport, SyncBatchNorm, convert_sync_batchnorm, fuse_activations

pytestmark = pytest.mark.usefixtures("aten")


def reasons(report: FusionReport) -> dict[str, str | None]:
    return {row.layer: row.reason for row in report.layers}


NOT_FUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "used twice": (lambda y, x: F.relu(y) + y, "its output is used more than once"),
    "changed in place first": (lambda y, x: F.relu(y.mul_(2)), "no activation follows"),
    "and returned": (lambda y, x: (F.relu(y), y)[0] + y.mean(), "used more than once"),
    "F.relu6": (lambda y, x: F.relu6(y), "no activation follows"),
    "tanh": (lambda y, x: F.gelu(y, approximate="tanh"), "no activation follows"),
    "of another tensor": (lambda y, x: F.relu(x) * y, "no activation follows"),
    "alpha": (lambda y, x: F.relu(torch.add(y, x, alpha=2)), "no activation follows"),
    "a constant": (lambda y, x: F.relu(y + 1), "what is added is not another tensor"),
    "twice itself": (lambda y, x: F.relu(y + y), "what is added is not another tensor"),
    "into the residual": (lambda y, x: F.relu((x * 1).add_(y)), "added in place to another tensor"),
    "the sum is used": (lambda y, x: F.relu(s := y + x) + s, "the sum is used more than once"),
    "no activation": (lambda y, x: y + x, "no activation follows in the same forward"),
    "multiplied": (lambda y, x: F.relu(y * x), "no activation follows"),
    "chooses": (lambda y, x: F.relu(y) if x.sum() > 0 else y, "cannot be traced"),
    "makes a tensor": (lambda y, x: F.relu(y) + torch.ones(()), "makes a tensor"),
    "draws": (lambda y, x: F.relu(y) if torch.rand(()) < 2 else y, "draws random numbers"),
    "no_grad": (lambda y, x: torch.no_grad()(F.relu)(y) + x, "switches gradients"),
    "enable_grad": (lambda y, x: torch.enable_grad()(F.relu)(y), "switches gradients"),
    "autocast": (lambda y, x: torch.autocast("cpu", enabled=False)(F.relu)(y), "or autocast"),
    "checkpoint": (
        lambda y, x: torch.utils.checkpoint.checkpoint(F.relu, y, use_reentrant=False),
        "checkpointing",
    ),
}


@pytest.mark.parametrize("tail", NOT_FUSED)
def test_what_is_left_alone(tail: str) -> None:
    function, reason = NOT_FUSED[tail]
    model = converted(Functional(function))
    before, x = {name: vars(m).copy() for name, m in model.named_modules()}, images()
    right = step(copy.deepcopy(model), x)
    (row,) = fuse_activations(model).layers
    assert reason in str(row.reason)
    assert {name: vars(m) for name, m in model.named_modules()} == before
    ours = step(model, x)
    assert all(torch.equal(ours[name], right[name]) for name in right)


class Variant(nn.Module):
    """A layer and an activation, called by a method to be overridden."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.calls = nn.BatchNorm2d(3), nn.SiLU(), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


class CallsTwice(Variant):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.act(self.norm(x))))


class DependsOnMode(Variant):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x)) if self.training else self.norm(x)


class Optional(Variant):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.act(self.norm(x) if residual is None else self.norm(x) + residual)


class Counts(Variant):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.act(self.norm(x))


class InputChanges(Variant):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.act(y + x.mul_(2))


class ChoosesByType(Variant):
    def forward(self, x: Tensor) -> Tensor:
        x = x if isinstance(x, Tensor) else x + 0
        return self.act(self.norm(x) + x)


class ChangesAChild(Variant):
    def forward(self, x: Tensor) -> Tensor:
        self.act.inplace = not self.act.inplace
        return self.act(self.norm(x))


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        (CallsTwice, "stands or is called in several places"),
        (DependsOnMode, "in DependsOnMode, its forward depends on its mode"),
        (Optional, "in Optional, its forward takes optional arguments"),
        (Counts, "in Counts, its forward changes its attributes"),
        (ChangesAChild, "in ChangesAChild, its forward changes its attributes"),
        (ChoosesByType, "ChoosesByType may choose by the type of its input"),
        (InputChanges, "its input may change before the sum"),
    ],
)
def test_forwards_that_are_left_alone(variant: type[Variant], reason: str) -> None:
    model = converted(nn.Sequential(variant()))
    before = {name: vars(m).copy() for name, m in model.named_modules()}
    assert reasons(fuse_activations(model)) == {"0.norm": reason}
    assert {name: vars(m) for name, m in model.named_modules()} == before


def change(change: str, model: Variant) -> None:
    if change == "hook on the layer":
        with_hook(model.norm)
    elif change == "backward hook on the layer":
        model.norm.register_full_backward_hook(lambda *_: None)
    elif change == "hook on the activation":
        with_hook(model.act)
    elif change == "subclass of an activation":
        model.act = type("Ours", (nn.ReLU,), {})()
    elif change == "GELU by tanh":
        model.act = nn.GELU(approximate="tanh")
    elif change == "activation of its own":
        model.norm = SyncBatchNorm(3, activation="relu")
    elif change == "parametrized":
        parametrize.register_parametrization(model.norm, "weight", nn.Identity())
    elif change == "forward on the object":
        model.forward = model.act.forward
    elif change == "not converted":
        model.norm = nn.BatchNorm2d(3)
    elif change == "under two names":
        model.other = model.norm


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("hook on the layer", "has hooks"),
        ("backward hook on the layer", "has hooks"),
        ("hook on the activation", "no activation follows"),
        ("subclass of an activation", "no activation follows"),
        ("GELU by tanh", "no activation follows"),
        ("activation of its own", "has an activation"),
        ("parametrized", "is a ParametrizedSyncBatchNorm"),
        ("forward on the object", "in Variant, its forward was set on the object"),
        ("not converted", "is a BatchNorm2d, not a SyncBatchNorm"),
        ("under two names", "stands or is called in several places"),
    ],
)
def test_layers_that_are_left_alone(changed: str, reason: str) -> None:
    model = convert_sync_batchnorm(Variant())
    change(changed, model)
    (row,) = fuse_activations(model).layers
    assert reason in str(row.reason)
