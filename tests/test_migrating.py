"""What docs/migrating.md says of other packages' layers, and of ours beside them.

The packages are rarely installed where the tests run, so each layer has a minimal copy here: its
arguments, and how it registers its state. Files they were read in are named in the document.
"""

import importlib
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn_triton import SyncBatchNorm, convert_sync_batchnorm

DOCUMENT = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text()


class Apex(_BatchNorm):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class Vacancy(_BatchNorm):
    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)

    def forward(self, input: Tensor) -> Tensor:
        raise NotImplementedError


class Detectron2(nn.BatchNorm2d):
    def __init__(self, *args: Any, stats_mode: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        raise NotImplementedError


class Fairscale(nn.BatchNorm2d):
    def __init__(self, *args: Any, process_group: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        raise NotImplementedError


class Plain(nn.Module):
    """State as inplace_abn and mmcv register it, without a batch norm of torch."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))


class InPlaceAbn(Plain):
    _version = 2

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        group: Any = None,
    ) -> None:
        super().__init__(num_features)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """In evaluation, with a leaky ReLU."""
        weight = self.weight.abs() + self.eps
        y = F.batch_norm(x, self.running_mean, self.running_var, weight, self.bias, eps=self.eps)
        return F.leaky_relu(y, 0.01)


class Mmcv(Plain):
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: Any = None,
        stats_mode: str = "default",
    ) -> None:
        super().__init__(num_features)


# By the first cell of the table that lists their arguments.
COPIES: dict[str, type[nn.Module]] = {
    "apex.parallel.SyncBatchNorm": Apex,
    "SynchronizedBatchNorm1d, 2d, 3d": Vacancy,
    "InPlaceABNSync": InPlaceAbn,
    "NaiveSyncBatchNorm": Detectron2,
    "mmcv.ops.SyncBatchNorm": Mmcv,
    "fairscale.experimental.nn.SyncBatchNorm": Fairscale,
}
IMPORTED_FROM = {
    "apex.parallel.SyncBatchNorm": "apex.parallel.SyncBatchNorm",
    "SynchronizedBatchNorm1d, 2d, 3d": "sync_batchnorm.SynchronizedBatchNorm1d",
    "InPlaceABNSync": "inplace_abn.InPlaceABNSync",
    "NaiveSyncBatchNorm": "detectron2.layers.NaiveSyncBatchNorm",
    "mmcv.ops.SyncBatchNorm": "mmcv.ops.SyncBatchNorm",
    "fairscale.experimental.nn.SyncBatchNorm": "fairscale.experimental.nn.SyncBatchNorm",
}
# The bias came with torch 2.13.
TORCH = {n: p for n, p in inspect.signature(nn.SyncBatchNorm).parameters.items() if n != "bias"}
OURS = inspect.signature(SyncBatchNorm).parameters


def arguments(layer: type[nn.Module]) -> set[str]:
    """What a constructor takes, that of the base class included where it passes those on."""
    named = inspect.signature(layer).parameters.values()
    names = {p.name for p in named if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    passes_on = any(p.kind is p.VAR_KEYWORD for p in named)
    return names | arguments(nn.BatchNorm2d) - {"bias"} if passes_on else names


def rows(first: str) -> dict[str, str]:
    """First and second column of the table whose header starts with this cell."""
    start = DOCUMENT.index(f"\n| {first} |") + 1
    lines = DOCUMENT[start:].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:]] for line in lines]
    return {cell[0].strip("`"): cell[1].strip("`") for cell in cells}


@pytest.mark.parametrize("name", [*COPIES, "torch"])
def test_every_argument_has_a_row(name: str) -> None:
    theirs = {*TORCH, "bias"} if name == "torch" else arguments(COPIES[name])
    listed = {row.split("=")[0].split("(")[0] for row in rows(name)}
    assert theirs <= listed


@pytest.mark.parametrize("name", [*COPIES, "torch"])
def test_what_they_are_here_exists(name: str) -> None:
    for theirs, ours in rows(name).items():
        named = theirs if ours == "the same" else re.split(r"[(= ]", ours)[0]
        assert named in {*OURS, "none", "forward", "layer.process_group"}, theirs


def test_installed_packages_have_these_arguments() -> None:
    seen = 0
    for name, path in IMPORTED_FROM.items():
        package, layer = path.rsplit(".", 1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                real = getattr(importlib.import_module(package), layer)
        except (ImportError, AttributeError):
            continue
        seen += 1
        assert arguments(real) == arguments(COPIES[name]), path
    if not seen:
        pytest.skip("none of the other packages is installed")


@pytest.mark.parametrize("layer", [*COPIES.values(), nn.SyncBatchNorm, nn.BatchNorm2d])
def test_state_dicts_load_both_ways(layer: type[nn.Module]) -> None:
    theirs, ours = layer(4), SyncBatchNorm(4)
    nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("layer", [Apex, Vacancy, Detectron2, Fairscale])
def test_their_batch_norms_are_left_alone_with_a_warning(layer: type[nn.Module]) -> None:
    with pytest.warns(UserWarning, match="forward of its own"):
        model = convert_sync_batchnorm(nn.Sequential(layer(4)))
    assert type(model[0]) is layer


@pytest.mark.parametrize("layer", [InPlaceAbn, Mmcv])
def test_their_plain_modules_are_left_alone(layer: type[nn.Module]) -> None:
    assert type(convert_sync_batchnorm(nn.Sequential(layer(4)))[0]) is layer


def test_torchs_arguments_come_first_and_in_its_order() -> None:
    assert list(OURS)[: len(TORCH)] == list(TORCH)
    assert [OURS[name].default for name in TORCH] == [p.default for p in TORCH.values()]


def test_a_second_conversion_drops_the_group_in_torch_only() -> None:
    group: Any = object()
    theirs, ours = nn.SyncBatchNorm(4), SyncBatchNorm(4)
    theirs.process_group = ours.process_group = group
    assert nn.SyncBatchNorm.convert_sync_batchnorm(theirs).process_group is None
    assert convert_sync_batchnorm(ours).process_group is group
    assert convert_sync_batchnorm(theirs).process_group is group


def test_optimizers_stay_right() -> None:
    for convert in (nn.SyncBatchNorm.convert_sync_batchnorm, convert_sync_batchnorm):
        layer = nn.BatchNorm2d(4)
        assert convert(layer).weight is layer.weight


def test_channels_in_the_last_dimension() -> None:
    """As apex with channel_last and fuse_relu, which takes (N, H, W, C)."""
    x = torch.randn(2, 5, 7, 4)
    layer = SyncBatchNorm(4, activation="relu")
    nn.init.normal_(layer.weight)
    permuted = x.permute(0, 3, 1, 2)
    assert permuted.is_contiguous(memory_format=torch.channels_last)
    y = layer(permuted).permute(0, 2, 3, 1)
    assert y.is_contiguous()
    flat = F.batch_norm(x.flatten(0, 2), None, None, layer.weight, layer.bias, training=True)
    torch.testing.assert_close(y.flatten(0, 2), flat.relu())


def test_an_eps_that_is_a_floor() -> None:
    """sqrt(max(var, eps)) instead of sqrt(var + eps): off by eps / (2 var), in training only."""
    x = torch.randn(64, 4, 8, 8, dtype=torch.float64) * 0.1
    layer = SyncBatchNorm(4, dtype=torch.float64)
    var, mean = (v.view(1, -1, 1, 1) for v in torch.var_mean(x, (0, 2, 3), correction=0))
    floored = (x - mean) / var.clamp(layer.eps).sqrt()
    off = (floored / layer(x)).mean((0, 2, 3)) - 1
    torch.testing.assert_close(off, layer.eps / (2 * var.flatten()), rtol=1e-2, atol=0)


def test_checkpoints_without_a_counter() -> None:
    """Of torch before 0.4.1, which are of no version; and of frozen batch norms, which have one."""
    state = SyncBatchNorm(4).state_dict()
    state._metadata[""]["version"] = 3
    del state["num_batches_tracked"]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        SyncBatchNorm(4).load_state_dict(state)
    layer = SyncBatchNorm(4)
    layer.load_state_dict(dict(state))
    assert layer.num_batches_tracked == 0


def test_weights_of_inplace_abn() -> None:
    theirs = InPlaceAbn(4).eval()
    for tensor in (theirs.weight, theirs.bias, theirs.running_mean):
        nn.init.normal_(tensor)
    assert (theirs.weight < 0).any()
    ours = SyncBatchNorm(4, activation="leaky_relu").eval()
    x, state = torch.randn(2, 4, 5, 5), theirs.state_dict()
    ours.load_state_dict(state)
    assert (ours(x) - theirs(x)).abs().max() > 0.1
    state["weight"] = state["weight"].abs() + ours.eps
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(x), theirs(x))


def kept_for_backward(forward: Callable[[Tensor], Tensor]) -> int:
    """Full-size tensors that a layer and the user of its output keep."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    x = torch.randn(8, 4, 16, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = forward(x).square()
    assert y.requires_grad
    return sum(numel == x.numel() for numel in kept.values())


def test_memory_beside_torchs_operators() -> None:
    relu = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    assert kept_for_backward(SyncBatchNorm(4, activation="relu")) == kept_for_backward(relu) == 2
    for name, activation in [("leaky_relu", nn.LeakyReLU), ("silu", nn.SiLU), ("gelu", nn.GELU)]:
        torchs = nn.Sequential(nn.BatchNorm2d(4), activation())
        assert kept_for_backward(SyncBatchNorm(4, activation=name)) == 2
        assert kept_for_backward(torchs) == 3


def train_once(rank: int, xs: list[Tensor]) -> tuple[Tensor, Tensor]:
    layer = SyncBatchNorm(3, momentum=1.0)
    layer(xs[rank])
    return layer.running_mean, layer.running_var


def test_uneven_ranks(ranks: RankPool) -> None:
    """Ours are the statistics of all values, theirs those of ranks that weigh the same or by N."""
    xs = [torch.randn(2, 3, 4, 4), torch.randn(6, 3, 8, 8) * 2 + 1]
    values = torch.cat([x.transpose(0, 1).flatten(1) for x in xs], 1)
    M = values.shape[1]
    for mean, var in ranks.run(2, train_once, xs):
        torch.testing.assert_close(mean, values.mean(1))
        torch.testing.assert_close(var, values.var(1))
    local = torch.stack([x.mean((0, 2, 3)) for x in xs])
    squares = torch.stack([x.square().mean((0, 2, 3)) for x in xs])
    for share in (torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])):
        theirs = share @ squares - (share @ local) ** 2
        assert ((share @ local - values.mean(1)).abs() > 1e-3).any()
        assert ((theirs * M / (M - 1) - values.var(1)).abs() > 1e-3).any()
    # Where ranks are even only the factor remains.
    even = torch.stack(xs[1].chunk(2))
    biased = even.square().mean((1, 3, 4)).mean(0) - even.mean((1, 3, 4)).mean(0) ** 2
    M = xs[1].numel() // 3
    unbiased = xs[1].transpose(0, 1).flatten(1).var(1)
    torch.testing.assert_close(biased * M / (M - 1), unbiased, rtol=1e-5, atol=0)


def test_a_difference_of_squares_loses_the_variance() -> None:
    x = torch.randn(8, 3, 16, 16) + 1e4
    exact = x.double().var((0, 2, 3), correction=0)
    difference = x.square().mean((0, 2, 3)) - x.mean((0, 2, 3)).square()
    assert ((difference - exact).abs() > 0.5).any()
    layer = SyncBatchNorm(3, momentum=1.0)
    layer(x)
    M = x.numel() // 3
    torch.testing.assert_close(layer.running_var.double(), exact * M / (M - 1), rtol=1e-6, atol=0)
