"""A fused residual and activation: what is saved, arguments that do not fit, special values, and
all that a layer goes through besides a step.
"""

import copy
import io
import math
import pickle
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from oracle import Layer
from ranks import RankPool
from syncbn_triton.kernels import activation as kernels
from syncbn_triton.kernels.epilogue import ACTIVATIONS, PIECEWISE_LINEAR
from test_activation import CASES, SLOPE, activate, assert_composed, steady
from test_cases_higher_order import gathered
from test_cases_layout import FP64, VIEWS, channels_last, randn, random_layer
from test_parity import build
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from syncbn_triton import SyncBatchNorm, sync_batch_norm
from syncbn_triton.activation import activate as activate_by_aten
from syncbn_triton.activation import backpropagate as backpropagate_by_aten
from syncbn_triton.backend import VARIABLE, backend_for

Tensors = dict[str, Tensor]
EVERY = pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
# The first checkpoint or compilation of a process imports torch's compiler, which takes seconds.
TIMEOUT = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _aten_unless_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the interpreter, the kernels would serve CPU tensors."""
    if "backend" not in request.fixturenames:
        monkeypatch.setenv(VARIABLE, "aten")
        backend_for.cache_clear()


class Composed(nn.Module):
    """Torch's layer, then the sum, then the activation."""

    def __init__(self, activation: str | None, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, **options)
        self.norm._check_input_dim = lambda input: None
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        return activate(y if residual is None else y + residual, self.activation)


def pair(activation: str | None, **options: Any) -> tuple[SyncBatchNorm, Composed]:
    """A layer of ours and torch's composition, in the same state."""
    composed = Composed(activation, **options)
    for tensor in (composed.norm.weight, composed.norm.bias, composed.norm.running_mean):
        nn.init.normal_(tensor)
    ours = SyncBatchNorm(3, activation=activation, negative_slope=SLOPE, **options)
    ours.load_state_dict(composed.norm.state_dict())
    return ours, composed


def outcome(module: nn.Module, layer: nn.Module, x: Tensor, residual: Tensor | None) -> Tensors:
    """Results of a step whose loss is not linear, and the state of the layer after it."""
    x = x.detach().requires_grad_()
    inputs = [x] if residual is None else [x, residual.detach().requires_grad_()]
    layer.zero_grad()
    y = module(*inputs)
    y.tanh().sum().backward()
    gradients = {f"grad_{name}": p.grad for name, p in layer.named_parameters()}
    of_inputs = {name: t.grad for name, t in zip(("dx", "dresidual"), inputs, strict=False)}
    return {"y": y.detach(), **of_inputs, **gradients, **layer.state_dict()}


# Evaluation.


@pytest.mark.parametrize(("activation", "added"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_evaluation_is_torchs(activation: str | None, added: bool, dtype: torch.dtype) -> None:
    ours, composed = (module.eval() for module in pair(activation, dtype=dtype))
    x, residual = torch.randn(2, 4, 3, 5, 6).to(dtype)
    residual = residual if added else None
    right = outcome(composed, composed.norm, x, residual)
    torch.testing.assert_close(outcome(ours, ours, x, residual), right, rtol=0, atol=0)


class Block(nn.Module):
    """What of a residual network has a shortcut."""

    def __init__(self, activation: str | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = SyncBatchNorm(3, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x), x)


@EVERY
def test_an_exported_program_is_of_torchs_operators(activation: str | None) -> None:
    model, x = Block(activation).eval(), torch.randn(2, 3, 4, 5)
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(model, (x,), dynamic_shapes=(batch,))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert {target.namespace for target in called} == {"aten"}
    x = torch.randn(5, 3, 4, 5)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
@EVERY
def test_a_trace_is_of_torchs_operators(activation: str | None) -> None:
    model = Block(activation).eval()
    traced = torch.jit.trace(model, (torch.randn(2, 3, 4, 5),))
    assert "aten::batch_norm" in str(traced.inlined_graph)
    assert "syncbn_triton::" not in str(traced.inlined_graph)
    x = torch.randn(5, 3, 6, 6)
    torch.testing.assert_close(traced(x), model(x))


# Memory.


def saved_by(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """What a forward keeps for backward."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(*inputs)
    return saved


@EVERY
@pytest.mark.parametrize("added", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["", "residual needs a gradient"])
def test_saved_tensors(backend: str, activation: str | None, added: bool, needs_grad: bool) -> None:
    """The input, one byte per element or the residual, and what is in proportion to channels."""
    module = SyncBatchNorm(3, activation=activation, dtype=torch.bfloat16)
    x = torch.randn(4, 3, 5, 6).bfloat16().requires_grad_()
    residual = torch.randn_like(x).requires_grad_(needs_grad)
    saved = saved_by(module, x, *([residual] if added else []))
    full = [t for t in saved if t.numel() == x.numel()]
    given = {x.data_ptr()}
    if not added or activation is None:
        assert len(full) == 1
    elif activation in PIECEWISE_LINEAR:
        assert [t.dtype for t in full] == [torch.bfloat16, torch.uint8]
        assert full[1].stride() == x.stride()
    else:
        assert len(full) == 2
        given.add(residual.data_ptr())
    assert {t.data_ptr() for t in full if t.dtype == x.dtype} == given
    assert all(t.numel() <= 3 * 3 + 1 for t in saved if t.numel() != x.numel())


class Operators(TorchDispatchMode):
    """Our operators that reach a device, and the names of their full-size results."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "syncbn_triton":
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            given |= kwargs or {}
            written = ["mask"] * isinstance(given.get("mask"), Tensor)
            self.written.append(written + ["wants_dz"] * given.get("wants_dz", False))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("activation", "needs_grad", "written"),
    [
        (None, True, [[], [], [], []]),
        ("silu", True, [[], [], ["wants_dz"], []]),
        ("silu", False, [[], [], [], []]),
        ("relu", True, [[], ["mask"], ["mask", "wants_dz"], []]),
        ("relu", False, [[], ["mask"], ["mask"], ["mask"]]),
    ],
)
def test_what_is_passed_from_one_operation_to_the_next(
    activation: str | None, needs_grad: bool, written: list[list[str]]
) -> None:
    """No gradient of a residual is stored that needs none."""
    x, residual = torch.randn(2, 4, 3, 5)
    residual.requires_grad_(needs_grad)
    with Operators() as operators:
        y = SyncBatchNorm(3, activation=activation)(x.requires_grad_(), residual)
        y.square().sum().backward()
    assert operators.written == written
    assert (residual.grad is not None) == needs_grad


def test_no_mask_is_written_where_no_backward_follows() -> None:
    x, residual = torch.randn(2, 4, 3, 5)
    with Operators() as operators, torch.no_grad():
        SyncBatchNorm(3, activation="relu")(x, residual)
    assert operators.written == [[], []]


# The residual.


def step_as_laid_out(
    layer: Layer, activation: str | None, x: Tensor, residual: Tensor, dy: Tensor
) -> Tensors:
    """One training step on tensors that nothing has made contiguous before."""
    options = {"num_features": x.shape[1], "dtype": x.dtype, "eps": layer.eps}
    module = build({**options, "activation": activation, "negative_slope": SLOPE}, layer)
    x, residual = x.detach().requires_grad_(), residual.detach().requires_grad_()
    y = module(x, residual)
    inputs = (x, module.weight, module.bias, residual)
    dx, grad_weight, grad_bias, dresidual = torch.autograd.grad(y, inputs, dy.to(y.dtype))
    return {
        "y": y.detach(),
        "dx": dx,
        "grad_weight": grad_weight,
        "grad_bias": grad_bias,
        "running_mean": module.running_mean,
        "running_var": module.running_var,
        "dresidual": dresidual,
    }


def check_step(layer: Layer, activation: str | None, x: Tensor, residual: Tensor) -> Tensors:
    """Compares a step with the oracle."""
    dy = steady(layer, x, residual, torch.randn(x.shape, dtype=x.dtype), activation)
    step = step_as_laid_out(layer, activation, x, residual, dy)
    assert_composed(step, layer, x, residual, dy, activation)
    return step


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_a_residual_of_any_layout(backend: str, name: str, activation: str | None) -> None:
    residual = VIEWS[name]()
    x = randn(*residual.shape)
    check_step(random_layer(x.shape[1]), activation, x, residual)


@pytest.mark.parametrize("name", ["transposed image", "cropped, channels-last", "batch innermost"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_an_input_of_any_layout(backend: str, name: str, activation: str) -> None:
    x = VIEWS[name]()
    check_step(random_layer(x.shape[1]), activation, x, randn(*x.shape))


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_results_have_the_format_of_the_input(backend: str, activation: str | None) -> None:
    layer, plain, last = random_layer(3), randn(2, 3, 4, 5), channels_last(2, 3, 4, 5)
    for x, residual in ((plain, last), (last, plain)):
        step = check_step(layer, activation, x, residual)
        assert step["y"].stride() == step["dx"].stride() == x.stride()


@pytest.mark.parametrize(
    ("dtype", "of_residual"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
@EVERY
def test_a_residual_of_another_dtype(
    backend: str, activation: str | None, dtype: torch.dtype, of_residual: torch.dtype
) -> None:
    """The sum has the dtype that torch promotes the two to, each gradient that of its tensor."""
    x, residual = torch.randn(4, 3, 5).to(dtype), torch.randn(4, 3, 5).to(of_residual)
    layer = random_layer(3)
    for name in ("weight", "bias", "running_mean", "running_var"):
        setattr(layer, name, getattr(layer, name).to(dtype))
    step = check_step(layer, activation, x, residual)
    assert step["y"].dtype == torch.promote_types(dtype, of_residual)
    assert (step["dx"].dtype, step["dresidual"].dtype) == (dtype, of_residual)


@EVERY
def test_the_input_itself_as_residual(backend: str, activation: str | None) -> None:
    ours, composed = pair(activation, dtype=torch.float64)
    x = randn(4, 3, 5)
    right = outcome(lambda x: composed(x, x), composed.norm, x, None)
    torch.testing.assert_close(outcome(lambda x: ours(x, x), ours, x, None), right, **FP64)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("residual", "error", "message"),
    [
        (torch.ones(4, 3, 1), ValueError, r"input's shape \(4, 3, 5\) \(got \(4, 3, 1\)\)"),
        (torch.ones(3, 1), ValueError, r"input's shape \(4, 3, 5\) \(got \(3, 1\)\)"),
        (torch.ones(4, 3, 5).long(), NotImplementedError, r"floating dtype \(got torch\.int64\)"),
        (torch.ones(4, 3, 5).bool(), NotImplementedError, r"floating dtype \(got torch\.bool\)"),
        (torch.ones(4, 3, 5, device="meta"), RuntimeError, "cpu and residual on meta"),
    ],
    ids=["broadcast", "fewer dimensions", "integers", "bools", "another device"],
)
def test_a_residual_that_does_not_fit(
    training: bool, residual: Tensor, error: type[Exception], message: str
) -> None:
    module = SyncBatchNorm(3, activation="relu").train(training)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=message):
        module(torch.randn(4, 3, 5), residual)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def raise_before_any_collective(rank: int) -> None:
    module = SyncBatchNorm(3, activation="relu")
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=re.escape("(2, 3, 4) (got (2, 3, 1))")):
        module(torch.randn(2, 3, 4), torch.randn(2, 3, 1))
    module.activation = "tanh"
    with pytest.raises(ValueError, match="got 'tanh'"):
        module(torch.randn(2, 3, 4))
    assert dist.group.WORLD._get_sequence_number_for_group() == 0
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_nothing_is_communicated_or_changed_before_an_error(ranks: RankPool) -> None:
    ranks.run(2, raise_before_any_collective)


@pytest.mark.parametrize("activation", ["tanh", "ReLU", "", "none"])
def test_an_unknown_activation(activation: str) -> None:
    message = re.escape(
        "expected activation to be None or one of relu, leaky_relu, silu, gelu, hardswish "
        f"(got {activation!r})"
    )
    with pytest.raises(ValueError, match=message):
        SyncBatchNorm(3, activation=activation)
    for training in (True, False):
        arguments = (torch.randn(4, 3), torch.zeros(3), torch.ones(3))
        with pytest.raises(ValueError, match=message):
            sync_batch_norm(*arguments, training=training, activation=activation)


# Kinks and special values.

SPECIAL = [0.0, -0.0, 3.0, -3.0, 2.9999998, -2.9999998, 3.0000002, -3.0000002, 1e-30, -1e-30]
SPECIAL += [math.inf, -math.inf, math.nan, 88.0, -88.0, 100.0, -100.0, 1e20, -1e20]
SAME = {"rtol": 1e-6, "atol": 1e-6, "equal_nan": True}


@triton.jit
def activation_kernel(
    z_ptr,
    dy_ptr,
    y_ptr,
    dz_ptr,
    n,
    negative_slope: tl.float64,
    A: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.arange(0, BLOCK)
    z = tl.load(z_ptr + offs, mask=offs < n, other=0.0)
    dy = tl.load(dy_ptr + offs, mask=offs < n, other=0.0)
    tl.store(y_ptr + offs, kernels.activate(z, negative_slope, A), mask=offs < n)
    dz = kernels.backpropagate(dy, z, negative_slope, A)
    tl.store(dz_ptr + offs, dz, mask=offs < n)


def well_defined(z: Tensor, activation: str) -> Tensor:
    """Where torch's own result is one, whatever part of a vector register an element lies in.

    The derivative of `hardswish` at NaN is 1 or NaN, `gelu` of infinity is that or NaN, and that of
    `silu` is 0 where it should be subnormal.
    """
    if activation == "hardswish":
        return ~z.isnan()
    unlike = {"gelu": math.inf, "silu": -100.0}.get(activation)
    return torch.ones_like(z, dtype=torch.bool) if unlike is None else z != unlike


def by_kernel(z: Tensor, dy: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    y, dz = torch.empty_like(z), torch.empty_like(z)
    activation_kernel[(1,)](z, dy, y, dz, z.numel(), SLOPE, activation, BLOCK=32)
    return y, dz


def by_aten(z: Tensor, dy: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return (
        activate_by_aten(z, activation, SLOPE),
        backpropagate_by_aten(dy, z, activation, SLOPE),
    )


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("dy", [-0.5, 0.0, math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("function", [by_aten, by_kernel])
def test_values_and_derivatives_at_kinks_and_of_special_values(
    function: Callable[..., tuple[Tensor, Tensor]], activation: str, dtype: torch.dtype, dy: float
) -> None:
    z = torch.tensor(SPECIAL, dtype=dtype, requires_grad=True)
    dy = torch.full_like(z, dy)
    y, dz = function(z.detach(), dy, activation)
    right = activate(z, activation)
    right.backward(dy)
    known = well_defined(z.detach(), activation)
    torch.testing.assert_close(y[known], right.detach()[known], **SAME)
    torch.testing.assert_close(dz[known], z.grad[known], **SAME)
    if activation == "leaky_relu":
        assert torch.equal(y.signbit(), right.signbit())


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dy", [1.0, math.inf])
def test_special_values_of_the_residual(backend: str, activation: str, dy: float) -> None:
    """With a weight of 0 they are the activation's argument, in the forward and the backward."""
    options = {"activation": activation, "negative_slope": SLOPE}
    ours, composed = SyncBatchNorm(1, **options), nn.BatchNorm1d(1)
    for module in (ours, composed):
        nn.init.zeros_(module.weight)
    x = torch.randn(len(SPECIAL), 1)
    residual, other = (torch.tensor(SPECIAL).unsqueeze(1).requires_grad_() for _ in range(2))
    y, right = ours(x, residual), activate(composed(x) + other, activation)
    for result in (y, right):
        result.backward(torch.full_like(result, dy))
    known = well_defined(other.detach(), activation)
    torch.testing.assert_close(y.detach()[known], right.detach()[known], **SAME)
    torch.testing.assert_close(residual.grad[known], other.grad[known], **SAME)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_infinite_input_spoils_its_channel_alone(backend: str, activation: str) -> None:
    ours, composed = pair(activation)
    x = torch.randn(4, 3, 5)
    x[1, 1, 1] = math.inf
    actual, right = outcome(ours, ours, x, None), outcome(composed, composed.norm, x, None)
    for name in ("y", "dx"):
        assert torch.equal(actual[name].isfinite(), right[name].isfinite())


# Second derivatives.


def functional(activation: str | None, added: bool) -> Callable[..., Tensor]:
    """The layer as a function of x, weight, bias and the residual."""

    def normalize(x: Tensor, weight: Tensor, bias: Tensor, *residual: Tensor) -> Tensor:
        return sync_batch_norm(
            x,
            None,
            None,
            weight,
            bias,
            training=True,
            residual=residual[0] if added else None,
            activation=activation,
            negative_slope=SLOPE,
        )

    return normalize


@pytest.mark.parametrize(("activation", "added"), CASES)
def test_first_and_second_derivatives(activation: str | None, added: bool) -> None:
    inputs = [randn(4, 2), randn(2), randn(2), *([2 * randn(4, 2)] if added else [])]
    inputs = [t.requires_grad_() for t in inputs]
    normalize = functional(activation, added)
    torch.autograd.gradcheck(normalize, inputs, fast_mode=True)
    torch.autograd.gradgradcheck(normalize, inputs, fast_mode=True)


@pytest.mark.parametrize("backend", ["triton"], indirect=True)
@pytest.mark.parametrize("activation", ["gelu", "hardswish"])
def test_first_derivatives_through_the_kernels(backend: str, activation: str) -> None:
    inputs = [t.requires_grad_() for t in (randn(3, 1), randn(1), randn(1), randn(3, 1))]
    torch.autograd.gradcheck(functional(activation, True), inputs, fast_mode=True)


def gradients_of_penalty(
    function: Callable[..., Tensor], layer: nn.Module, x: Tensor, residual: Tensor | None
) -> Tensors:
    """Gradients of how far those of a first loss are from 1, over samples."""
    given = {"x": x.detach().requires_grad_()}
    if residual is not None:
        given["residual"] = residual.detach().requires_grad_()
    layer.zero_grad()
    loss = function(*given.values()).square().sum()
    first = torch.autograd.grad(loss, list(given.values()), create_graph=True)
    sum((g.flatten(1).norm(dim=1) - 1).square().sum() for g in first).backward()
    second = {name: t.grad for name, t in given.items()}
    return {"dx": first[0].detach(), **second, **{n: p.grad for n, p in layer.named_parameters()}}


def penalize_on_rank(
    rank: int, state: Tensors, xs: list[Tensor], residuals: list[Tensor]
) -> list[Tensors]:
    results = []
    for activation, added in CASES:
        layer = SyncBatchNorm(3, activation=activation, negative_slope=SLOPE).double()
        layer.load_state_dict(state)
        residual = residuals[rank] if added else None
        results.append(gradients_of_penalty(layer, layer, xs[rank], residual))
    return results


@pytest.mark.parametrize("split", [(1, 4), (3, 0)], ids=str)
def test_gradient_penalty_across_ranks(ranks: RankPool, split: tuple[int, ...]) -> None:
    _, composed = pair(None, dtype=torch.float64)
    state = composed.norm.state_dict()
    x, residual = randn(2, sum(split), 3, 2, 2)
    results = ranks.run(2, penalize_on_rank, state, x.split(split), residual.split(split))
    for (activation, added), *of_ranks in zip(CASES, *results, strict=True):
        composed.activation = activation
        right = gradients_of_penalty(composed, composed.norm, x, residual if added else None)
        residuals = [r.pop("residual") for r in of_ranks] if added else []
        actual = gathered(of_ranks)
        if residuals:
            actual["residual"] = torch.cat(residuals)
        torch.testing.assert_close(actual, right, **FP64, msg=f"{activation}, {added}")


# A layer's life.


def test_representation() -> None:
    assert "activation" not in repr(SyncBatchNorm(3))
    assert repr(SyncBatchNorm(3, activation="silu")).endswith(
        "track_running_stats=True, activation='silu')"
    )
    assert repr(SyncBatchNorm(3, activation="leaky_relu", negative_slope=0.2)).endswith(
        "activation='leaky_relu', negative_slope=0.2)"
    )


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded],
    ids=["copy", "deepcopy", "pickle", "save"],
)
def test_a_duplicate_has_the_activation(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    module = SyncBatchNorm(3, activation="leaky_relu", negative_slope=SLOPE)
    x, residual = torch.randn(2, 4, 3)
    duplicated = duplicate(module)
    assert (duplicated.activation, duplicated.negative_slope) == ("leaky_relu", SLOPE)
    assert torch.equal(duplicated(x, residual), module(x, residual))


def test_a_layer_pickled_before_there_were_activations() -> None:
    module, x = SyncBatchNorm(3), torch.randn(4, 3)
    state = module.__getstate__()
    del state["activation"], state["negative_slope"]
    old = SyncBatchNorm.__new__(SyncBatchNorm)
    old.__setstate__(state)
    assert old.activation is None
    assert torch.equal(old(x), module(x))
    assert repr(old) == repr(module)


def test_state_is_that_of_torchs_layer() -> None:
    torchs, ours = nn.BatchNorm2d(3), SyncBatchNorm(3, activation="silu")
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    nn.init.normal_(torchs.weight)
    ours.load_state_dict(torchs.state_dict(), strict=True)
    torchs.load_state_dict(ours.state_dict(), strict=True)
    torch.testing.assert_close(ours.state_dict(), torchs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_checkpointed_step_is_as_without(activation: str, use_reentrant: bool) -> None:
    """The running statistics are updated once."""
    ours, composed = pair(activation, dtype=torch.float64)
    x, residual = randn(2, 4, 3, 5)

    def checkpointed(*inputs: Tensor) -> Tensor:
        return checkpoint(ours, *inputs, use_reentrant=use_reentrant)

    actual = outcome(checkpointed, ours, x, residual)
    assert ours.num_batches_tracked == 1
    right = outcome(composed, composed.norm, x, residual)
    torch.testing.assert_close(actual, right, **FP64)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@EVERY
def test_autocast(activation: str | None, training: bool) -> None:
    """The layer gets what the convolution before it returns, and a shortcut in fp32 or as it."""
    conv = nn.Conv2d(3, 3, 3, padding=1)
    ours, composed = (module.train(training) for module in pair(activation))
    x = torch.randn(4, 3, 6, 6)
    for shortcut in (lambda x: x, conv):
        results = []
        for norm, layer in ((ours, ours), (composed, composed.norm)):
            layer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = norm(conv(x), shortcut(x))
            y.float().square().mean().backward()
            results.append((y, layer.weight.grad))
        (y, grad), (right, right_grad) = results
        assert y.dtype == right.dtype == (torch.float32 if shortcut is not conv else torch.bfloat16)
        bound = 4 * torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(y, right, rtol=bound, atol=bound)
        torch.testing.assert_close(grad, right_grad, rtol=bound, atol=bound)


class Network(nn.Module):
    """Two blocks, the second of which sees what the first made of all ranks' samples."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.norms = nn.ModuleList(norm() for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = norm(linear(x), x)
        return x


def train(model: nn.Module, xs: Tensor) -> Tensors:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in xs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    state = model.state_dict().items()
    return {name.removeprefix("module.").replace(".norm.", "."): t for name, t in state}


def train_with_ddp(rank: int, activation: str, xs: list[Tensor]) -> Tensors:
    network = Network(lambda: SyncBatchNorm(3, activation=activation))
    return train(DistributedDataParallel(network), xs[rank])


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_training_with_ddp(ranks: RankPool, activation: str) -> None:
    xs = randn(3, 6, 3)
    right = train(Network(lambda: Composed(activation)), xs)
    for state in ranks.run(2, train_with_ddp, activation, xs.chunk(2, dim=1)):
        torch.testing.assert_close(state, right, **FP64)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("activation", "added", "compiler"),
    [
        ("relu", True, "aot_eager"),
        ("leaky_relu", False, "aot_eager"),
        ("silu", True, "aot_eager"),
        ("gelu", False, "aot_eager"),
        (None, True, "aot_eager"),
        ("relu", True, "inductor"),
    ],
)
def test_compiled_without_a_break(activation: str | None, added: bool, compiler: str) -> None:
    """Three steps as of torch's composition."""
    torch._dynamo.reset()
    ours, composed = pair(activation, dtype=torch.float64)
    compiled = torch.compile(ours, fullgraph=True, backend=compiler)
    for x, residual in randn(3, 2, 4, 3, 2):
        residual = residual if added else None
        actual = outcome(compiled, ours, x, residual)
        torch.testing.assert_close(actual, outcome(composed, composed.norm, x, residual), **FP64)


# Collectives.


def count_collectives(rank: int, training: bool) -> list[int]:
    """Collectives of one forward and backward for each case, by torch's counter of the group."""
    counts = []
    for activation, added in CASES:
        module = SyncBatchNorm(3, activation=activation).train(training)
        x, residual = torch.randn(2, 2, 3, 4, requires_grad=True)
        before = dist.group.WORLD._get_sequence_number_for_group()
        module(x, residual if added else None).sum().backward()
        counts.append(dist.group.WORLD._get_sequence_number_for_group() - before)
    return counts


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_one_collective_in_each_direction_and_none_in_evaluation(
    ranks: RankPool, training: bool
) -> None:
    assert ranks.run(2, count_collectives, training) == [[2 * training] * len(CASES)] * 2


def step_where_one_residual_needs_a_gradient(
    rank: int, xs: list[Tensor], residuals: list[Tensor], of_input: bool, create_graph: bool
) -> list[Tensors]:
    """Rank 0 needs the residual's gradient, and rank 1 none of its inputs' or the input's."""
    results = []
    for activation in (None, *ACTIVATIONS):
        module = SyncBatchNorm(3, activation=activation, negative_slope=SLOPE).double()
        x = xs[rank].detach().requires_grad_(rank == 0 or of_input)
        residual = residuals[rank].detach().requires_grad_(rank == 0)
        y = module(x, residual)
        leaves = [t for t in (module.weight, x, residual) if t.requires_grad]
        _, *gradients = torch.autograd.grad(y.tanh().sum(), leaves, create_graph=create_graph)
        results.append(dict(zip(("dx", "dresidual"), map(Tensor.detach, gradients), strict=False)))
    return results


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "create_graph"])
@pytest.mark.parametrize("of_input", [False, True], ids=["no input", "input"])
def test_one_rank_needs_no_gradient_of_its_residual(
    ranks: RankPool, of_input: bool, create_graph: bool
) -> None:
    split, (x, residual) = (2, 3), randn(2, 5, 3, 2)
    shares = (x.split(split), residual.split(split))
    arguments = (step_where_one_residual_needs_a_gradient, *shares, of_input, create_graph)
    for activation, first, second in zip(
        (None, *ACTIVATIONS), *ranks.run(2, *arguments), strict=True
    ):
        composed = Composed(activation, dtype=torch.float64)
        right = outcome(composed, composed.norm, x, residual)
        torch.testing.assert_close(first["dx"], right["dx"][:2], **FP64)
        torch.testing.assert_close(first["dresidual"], right["dresidual"][:2], **FP64)
        assert second.keys() == ({"dx"} if of_input else set())
        if of_input:
            torch.testing.assert_close(second["dx"], right["dx"][2:], **FP64)
