"""Users' cases: the layer under torch.func and torch.compile."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_cases_layout import FP64, randn, random_layer
from test_parity import build
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm

pytestmark = [
    # What torch does on import of its own modules, and in every compilation of a Function.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).tanh().sum())(x),
    "grad of grad": lambda f, x: torch.func.hessian(lambda x: f(x).tanh().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x.cos()),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x.cos()])),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_l12_transforms_in_evaluation(name: str) -> None:
    """pytorch#91629."""
    module = build({"num_features": 3, "dtype": torch.float64}, random_layer(3)).eval()
    mean, var, weight, bias = (
        t.detach().unsqueeze(1)
        for t in (module.running_mean, module.running_var, module.weight, module.bias)
    )

    def formula(x: Tensor) -> Tensor:
        return (x - mean) / (var + module.eps).sqrt() * weight + bias

    transform, x = TRANSFORMS[name], randn(2, 3, 2)
    torch.testing.assert_close(transform(module, x), transform(formula, x), **FP64)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_l12_transforms_in_training_raise(name: str) -> None:
    module = SyncBatchNorm(3).double()
    with pytest.raises(RuntimeError, match="setup_context"):
        TRANSFORMS[name](module, randn(2, 3, 2))
    assert module.num_batches_tracked == 0


def test_l12_forward_mode_in_training_raises() -> None:
    x = randn(2, 3, 2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x.cos())
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            SyncBatchNorm(3).double()(dual)


def test_l12_functional_call_in_training(backend: str) -> None:
    """The tensors given take part and are updated; those of the module are left alone."""
    module, torchs, x = SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double(), randn(4, 3, 2)
    given = {name: torch.rand_like(t.double()).to(t) for name, t in torchs.state_dict().items()}
    torchs.load_state_dict(given)
    y = torch.func.functional_call(module, given, (x,))
    torch.testing.assert_close(y, torchs(x), **FP64)
    torch.testing.assert_close(given, dict(torchs.state_dict()), **FP64)
    assert module.num_batches_tracked == 0


def batched_gradients(rank: int, x: Tensor, directions: Tensor, create_graph: bool) -> Tensor:
    x = x.detach().requires_grad_()
    y = SyncBatchNorm(3).double()(x)
    (dx,) = torch.autograd.grad(y, x, directions, is_grads_batched=True, create_graph=create_graph)
    return dx.detach()


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "create_graph"])
def test_l12_batched_gradients(backend: str, create_graph: bool) -> None:
    x, directions = randn(4, 3, 2).requires_grad_(), randn(5, 4, 3, 2)
    y = nn.BatchNorm1d(3).double()(x)
    right = [torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in directions]
    actual = batched_gradients(0, x, directions, create_graph)
    torch.testing.assert_close(actual, torch.stack(right), **FP64)


def batched_gradients_raise(rank: int, x: Tensor, directions: Tensor, create_graph: bool) -> None:
    with pytest.raises(RuntimeError, match="Batching rule not implemented for c10d::allreduce"):
        batched_gradients(rank, x, directions, create_graph)


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "create_graph"])
def test_l12_batched_gradients_across_ranks_raise(ranks: RankPool, create_graph: bool) -> None:
    ranks.run(2, batched_gradients_raise, randn(4, 3, 2), randn(5, 4, 3, 2), create_graph)


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()


def three_steps(module: nn.Module, layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Results of the last of three steps, and the state of the layer in the module after it."""
    for step in range(3):
        x = (x + step).detach().requires_grad_()
        layer.zero_grad()
        y = module(x)
        y.backward(dy)
    gradients = {f"grad_{name}": p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients, **layer.state_dict()}


@pytest.mark.parametrize(
    ("compiler", "options"),
    [
        ("eager", {"momentum": None}),
        ("aot_eager", {"momentum": None}),
        ("aot_eager", {"affine": False}),
    ],
    ids=str,
)
def test_l13_compiled_without_a_break(compiler: str, options: dict[str, Any]) -> None:
    """pytorch#194504."""
    x, dy = randn(4, 3, 2), randn(4, 3, 2)
    layer = SyncBatchNorm(3, dtype=torch.float64, **options)
    actual = three_steps(torch.compile(layer, fullgraph=True, backend=compiler), layer, x, dy)
    torchs = nn.BatchNorm1d(3, dtype=torch.float64, **options)
    torch.testing.assert_close(actual, three_steps(torchs, torchs, x, dy), **FP64)


def test_l13_compiled_evaluation() -> None:
    layer = build({"num_features": 3, "momentum": None}, random_layer(3)).eval()
    x = torch.randn(4, 3, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_l13_a_compiled_layer_says_that_it_has_no_second_derivative() -> None:
    compiled = torch.compile(SyncBatchNorm(3), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"create_graph|double backward"):
        torch.autograd.grad(compiled(x).tanh().sum(), x, create_graph=True)[0].sum().backward()


def three_compiled_steps(rank: int, xs: list[Tensor], dys: list[Tensor]) -> dict[str, Tensor]:
    layer = SyncBatchNorm(3, momentum=None, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    return three_steps(compiled, layer, xs[rank], dys[rank])


def test_l13_compiled_without_a_break_across_ranks(ranks: RankPool) -> None:
    x, dy = randn(5, 3, 2), randn(5, 3, 2)
    shares, timeout = (x.split((2, 3)), dy.split((2, 3))), timedelta(seconds=60)
    results = ranks.run(2, three_compiled_steps, *shares, timeout=timeout)
    torchs = nn.BatchNorm1d(3, momentum=None).double()
    for name, right in three_steps(torchs, torchs, x, dy).items():
        of_ranks = [r[name] for r in results]
        if name in ("y", "dx"):
            torch.testing.assert_close(torch.cat(of_ranks), right, **FP64)
        elif name.startswith("grad_"):
            torch.testing.assert_close(sum(of_ranks), right, **FP64)
        else:
            torch.testing.assert_close(of_ranks, [right, right], **FP64)
