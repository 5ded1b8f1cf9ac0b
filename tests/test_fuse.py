"""Activations and sums fused into the layers of a model: it computes what it did."""

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fusible import NETWORKS, Bottleneck, Functional, InvertedResidual, ResNet, step
from oracle import assert_near
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.utils import parametrize

from syncbn_triton import (
    FusionReport,
    SyncBatchNorm,
    convert_sync_batchnorm,
    fuse_activations,
    revert_sync_batchnorm,
    unfuse_activations,
)
from syncbn_triton.backend import VARIABLE, backend_for


@pytest.fixture(autouse=True)
def _aten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not the kernels, which other tests run: interpreted, they would take minutes here."""
    monkeypatch.setenv(VARIABLE, "aten")
    backend_for.cache_clear()
    yield
    backend_for.cache_clear()


def images(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*(size or (4, 3, 8, 8)), dtype=dtype)


def converted(model: nn.Module) -> nn.Module:
    return convert_sync_batchnorm(model.double())


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


def reasons(report: FusionReport) -> dict[str, str | None]:
    return {row.layer: row.reason for row in report.layers}


@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_computes_what_torchs_does(network: str) -> None:
    build, fused, residuals = NETWORKS[network]
    x = images()
    plain, x32 = build(), images(dtype=torch.float32)
    model = build().double()
    model.load_state_dict(plain.state_dict())
    exact = step(copy.deepcopy(model), x32.double())
    torchs = step(copy.deepcopy(plain), x32)
    right = step(copy.deepcopy(model), x)

    keys = list(model.state_dict())
    ids = {name: id(p) for name, p in model.named_parameters()}
    report = fuse_activations(convert_sync_batchnorm(model))
    assert (len(report.fused), sum(row.residual for row in report.fused)) == (fused, residuals)
    assert list(model.state_dict()) == keys
    assert {name: id(p) for name, p in model.named_parameters()} == ids
    assert_same(step(model, x), right)

    fuse_activations(convert_sync_batchnorm(plain))
    ours = step(plain, x32)
    for name in ("y", "evaluated"):
        assert_near(name, ours[name], exact[name], torchs[name], torch.float32)


@pytest.mark.parametrize("network", NETWORKS)
def test_fusing_twice_and_undoing(network: str) -> None:
    model, x = converted(NETWORKS[network][0]()), images()
    untouched = copy.deepcopy(model)
    modules = dict(model.named_modules())
    types = {name: type(module) for name, module in modules.items()}
    attributes = {name: vars(module).copy() for name, module in modules.items()}
    right = step(untouched, x)
    fuse_activations(model)
    fused = {name: type(module) for name, module in model.named_modules()}
    assert fused != types
    assert not fuse_activations(model).fused
    assert {name: type(module) for name, module in model.named_modules()} == fused
    for _ in range(2):
        assert unfuse_activations(model) is model
        found = dict(model.named_modules())
        assert found.keys() == modules.keys()
        assert all(found[name] is module for name, module in modules.items())
        assert {name: type(module) for name, module in found.items()} == types
        assert {name: vars(module) for name, module in found.items()} == attributes
    ours = step(model, x)
    assert all(torch.equal(ours[name], right[name]) for name in right)


TAILS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, bool]] = {
    "F.relu": (lambda y, x: F.relu(y), "relu", False),
    "F.relu in place": (lambda y, x: F.relu(y, inplace=True), "relu", False),
    "F.relu_": (lambda y, x: F.relu_(y), "relu", False),
    "torch.relu": (lambda y, x: torch.relu(y), "relu", False),
    "torch.relu_": (lambda y, x: torch.relu_(y), "relu", False),
    "relu": (lambda y, x: y.relu(), "relu", False),
    "relu_": (lambda y, x: y.relu_(), "relu", False),
    "F.leaky_relu": (lambda y, x: F.leaky_relu(y, 0.2, True), "leaky_relu", False),
    "F.leaky_relu default": (lambda y, x: F.leaky_relu(input=y), "leaky_relu", False),
    "F.leaky_relu_": (lambda y, x: F.leaky_relu_(y, negative_slope=0.2), "leaky_relu", False),
    "F.silu": (lambda y, x: F.silu(y), "silu", False),
    "F.gelu": (lambda y, x: F.gelu(y), "gelu", False),
    "F.hardswish": (lambda y, x: F.hardswish(y, inplace=True), "hardswish", False),
    "+": (lambda y, x: F.relu(y + x), "relu", True),
    "+ from the right": (lambda y, x: F.silu(x + y), "silu", True),
    "torch.add": (lambda y, x: F.gelu(torch.add(x, other=y, alpha=1)), "gelu", True),
    "add": (lambda y, x: F.hardswish(x.add(y)), "hardswish", True),
    "add_": (lambda y, x: F.leaky_relu(y.add_(x), 0.2), "leaky_relu", True),
    "a row": (lambda y, x: F.relu(y + x[:, :, :1]), "relu", True),
    "a row in place": (lambda y, x: F.relu(y.add_(x[:, :, :1])), "relu", True),
    "a number": (lambda y, x: F.relu(y + x.shape[0]), "relu", True),
    "another dtype": (lambda y, x: F.silu(y + x.float()), "silu", True),
    "another dtype in place": (lambda y, x: F.silu(y.add_(x.float())), "silu", True),
    "integers": (lambda y, x: F.silu(y + x.long()), "silu", True),
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_functions(tail: str, dtype: torch.dtype) -> None:
    """Also sums that broadcast or mix dtypes, which are computed as before."""
    function, activation, residual = TAILS[tail]
    model, x = converted(Functional(function)).to(dtype), images(dtype=dtype)
    right = step(copy.deepcopy(model), x)
    (row,) = fuse_activations(model).layers
    assert (row.activation, row.residual, row.reason) == (activation, residual, None)
    ours = step(model, x)
    assert {name: t.dtype for name, t in ours.items()} == {
        name: t.dtype for name, t in right.items()
    }
    if dtype == torch.float64:
        assert_same(ours, right)
    else:
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-4)


def test_what_a_sum_in_place_of_two_dtypes_returns() -> None:
    """As under autocast: half from a convolution, single from the layer before."""
    model = convert_sync_batchnorm(Functional(lambda y, x: F.relu(y.add_(x.float()))))
    x = images(dtype=torch.bfloat16)
    model.conv.to(torch.bfloat16)
    right = copy.deepcopy(model)(x)
    assert fuse_activations(model).fused
    assert model(x).dtype == right.dtype == torch.bfloat16
    assert torch.equal(model(x), right)


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


def with_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


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


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_copies(network: str, how: str) -> None:
    """They are fused as the original is, and are undone on their own."""
    model, x = converted(NETWORKS[network][0]()), images()
    unfused = step(copy.deepcopy(model), x)
    fuse_activations(model)
    types = [type(module) for module in model.modules()]
    if how == "copied":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    right = step(copy.deepcopy(model), x)
    assert [type(module) for module in other.modules()] == types
    assert not fuse_activations(other).fused
    ours = step(other, x)
    assert all(torch.equal(ours[name], right[name]) for name in right)
    unfuse_activations(other)
    assert [type(module) for module in model.modules()] == types
    other.load_state_dict(model.state_dict())
    ours = step(other, x)
    assert all(torch.equal(ours[name], unfused[name]) for name in unfused)


def test_hooks_flags_and_class_of_a_rewritten_module() -> None:
    model, calls = converted(Bottleneck(3, 3)), []
    handle = model.register_forward_hook(lambda *_: calls.append("hook"))
    model.bn1.eval()
    fuse_activations(model)
    assert isinstance(model, Bottleneck)
    assert type(model).__name__ == "FusedBottleneck"
    assert [model.training, model.bn1.training] == [True, False]
    model(images())
    handle.remove()
    model(images())
    assert calls == ["hook"]


def test_hooks_on_containers() -> None:
    """One that has a hook is left whole, one that gets a hook later still calls it."""
    hooked, later, calls = converted(Bottleneck(3, 3)), converted(ResNet()), []
    hooked.downsample.register_forward_hook(lambda *_: calls.append("before"))
    fuse_activations(hooked)
    hooked(images())
    fuse_activations(later)
    for container in (later.layer1, later.layer2[0].downsample):
        container.register_forward_hook(lambda *_: calls.append("later"))
    later(images())
    assert calls == ["before", "later", "later"]


def test_the_report_is_a_table() -> None:
    model = converted(nn.Sequential(Bottleneck(3, 3), InvertedResidual(6, nn.Hardswish)))
    assert str(fuse_activations(model)).split("\n") == [
        "layer           activation  residual",
        "0.bn1           relu                  fused",
        "0.bn2           relu                  fused",
        "0.bn3           relu        yes       fused",
        "0.downsample.1                        is the residual of 0.bn3",
        "1.block.0.1     hardswish             fused",
        "1.block.1.1                           no activation follows that can be fused",
        "1.block.2.bn    relu                  fused",
        "1.block.3.1                           no activation follows in the same forward",
    ]


def test_a_fused_layer_does_not_revert() -> None:
    model, x = converted(ResNet()), images()
    fuse_activations(model)
    with pytest.raises(ValueError, match=r"got 'relu' in bn1.*unfuse_activations first"):
        revert_sync_batchnorm(model)
    assert all(type(m) is not nn.BatchNorm2d for m in model.modules())
    model(x)
    revert_sync_batchnorm(unfuse_activations(model))
    assert type(model.bn1) is type(model.layer1[0].bn3) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="got 'silu' in the layer"):
        revert_sync_batchnorm(SyncBatchNorm(3, activation="silu"))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*there are global hooks on modules:UserWarning")
def test_one_graph_of_torch_compile() -> None:
    model, x = converted(Bottleneck(3, 3)), images()
    right = step(copy.deepcopy(model), x)
    fuse_activations(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled.train()(x), right["y"], rtol=0, atol=1e-12)


def train_on_rank(rank: int, network: str, state: dict[str, Any], xs: list[Tensor]) -> list[Any]:
    """Two steps of a fused network under DistributedDataParallel."""
    model = converted(NETWORKS[network][0]())
    model.load_state_dict(state)
    assert fuse_activations(model).fused
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return train(parallel, xs[rank]) + list(model.state_dict().values())


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ys = []
    for _ in range(2):
        optimizer.zero_grad()
        ys.append(model(x))
        ys[-1].square().mean().backward()
        optimizer.step()
    model.eval()
    return [y.detach() for y in (*ys, model(x))]


@pytest.mark.parametrize("network", NETWORKS)
def test_two_ranks_train_as_one_process(ranks: RankPool, network: str) -> None:
    model, x = NETWORKS[network][0]().double(), images(6, 3, 8, 8)
    results = ranks.run(2, train_on_rank, network, model.state_dict(), list(x.chunk(2)))
    right = train(model, x)
    for i, y in enumerate(right):
        ours = torch.cat([result[i] for result in results])
        torch.testing.assert_close(ours, y, rtol=1e-10, atol=1e-10)
    for result in results:
        ours = dict(zip(model.state_dict(), result[len(right) :], strict=True))
        torch.testing.assert_close(ours, dict(model.state_dict()), rtol=1e-10, atol=1e-10)


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's."""

    def __init__(self, C: int, act: nn.Module | None, drop: nn.Module | None = None) -> None:
        super().__init__(C)
        self.drop, self.act = drop or nn.Identity(), act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class DoesMore(BatchNormAct2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("act", "activation"),
    [
        (nn.ReLU(inplace=True), "relu"),
        (nn.LeakyReLU(0.2), "leaky_relu"),
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.Hardswish(), "hardswish"),
        (None, None),
    ],
    ids=str,
)
def test_timms_layer_converts_with_its_activation(
    act: nn.Module | None, activation: str | None
) -> None:
    model, x = nn.Sequential(BatchNormAct2d(3, act)).double(), images()
    right, before = step(copy.deepcopy(model), x), vars(model[0]).copy()
    convert_sync_batchnorm(model)
    assert type(model[0]) is SyncBatchNorm
    assert model[0].activation == activation
    assert_same(step(copy.deepcopy(model), x), right)
    revert_sync_batchnorm(model)
    assert type(model[0]) is BatchNormAct2d
    assert vars(model[0]) == before
    assert_same(step(model, x), right)


def hooked_relu() -> nn.Module:
    with_hook(relu := nn.ReLU())
    return relu


@pytest.mark.parametrize(
    "layer",
    [
        BatchNormAct2d(3, nn.ReLU(), nn.Dropout2d(0.1)),
        BatchNormAct2d(3, nn.ReLU6()),
        BatchNormAct2d(3, nn.GELU(approximate="tanh")),
        BatchNormAct2d(3, hooked_relu()),
        DoesMore(3, nn.ReLU()),
    ],
    ids=str,
)
def test_timms_layers_that_are_left_alone(layer: nn.Module) -> None:
    with pytest.warns(UserWarning, match="has a forward of its own"):
        assert convert_sync_batchnorm(layer) is layer


def test_an_activation_fused_after_timms_layer_does_not_revert() -> None:
    model = convert_sync_batchnorm(nn.Sequential(BatchNormAct2d(3, None), nn.ReLU()))
    assert fuse_activations(model).fused
    with pytest.raises(ValueError, match="unfuse_activations first"):
        revert_sync_batchnorm(model)
    assert type(revert_sync_batchnorm(unfuse_activations(model))[0]) is BatchNormAct2d


def installed(package: str, name: str) -> nn.Module:
    """A network of a package that works with the installed torch, in double."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if package == "timm":
                import timm

                return timm.create_model(name).double()
            import torchvision

            return getattr(torchvision.models, name)(weights=None).double()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{package} cannot be imported: {error}")


@pytest.mark.parametrize(
    ("package", "name", "fused", "residuals"),
    [
        ("torchvision", "resnet50", 49, 16),
        ("torchvision", "mobilenet_v3_small", 23, 0),
        ("torchvision", "regnet_y_400mf", 49, 16),
        ("timm", "resnet26d", 27, 8),
        ("timm", "mobilenetv3_small_100", 0, 0),
    ],
)
def test_networks_of_packages(package: str, name: str, fused: int, residuals: int) -> None:
    model, x = installed(package, name), images(3, 3, 64, 64)
    torch.manual_seed(0)  # of dropout
    right = step(copy.deepcopy(model), x)
    rows = fuse_activations(convert_sync_batchnorm(model)).fused
    assert (len(rows), sum(row.residual for row in rows)) == (fused, residuals)
    torch.manual_seed(0)
    # So many layers enlarge roundings.
    assert_same(step(model, x), right, 1e-9)
