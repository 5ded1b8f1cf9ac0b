"""The layer under torch.compile: one graph, and what it computes uncompiled.

Nearly all in float64, within `FP64`: a compiler may reorder a sum, and nothing more.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from test_cases_layout import FP64, randn
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from syncbn_triton import SyncBatchNorm, convert_sync_batchnorm

pytestmark = [
    # What torch does on import of its own modules, and in every compilation of a Function.
    pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
# The first compilation of a process imports the compiler, and Inductor calls that of C++.
TIMEOUT = timedelta(seconds=90)

# Options of a layer, and whether it is given a residual.
FEATURES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "momentum=None": ({"momentum": None}, False),
    "affine=False": ({"affine": False}, False),
    "no statistics": ({"track_running_stats": False}, False),
    "residual": ({}, True),
    "relu": ({"activation": "relu"}, False),
    "relu, residual": ({"activation": "relu"}, True),
    "silu": ({"activation": "silu"}, False),
    "silu, residual, no bias": ({"activation": "silu", "bias": False}, True),
}
# Samples of 2 ranks in each step.
STATIC = [(2, 3)] * 3
DYNAMIC = [(2, 3), (3, 5), (5, 4)]
ONE_EMPTY = [(4, 0)] * 3


class Block(nn.Module):
    """A layer whose residual is a function of its input, in a checkpoint or not."""

    def __init__(self, options: dict[str, Any], added: bool, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = SyncBatchNorm(3, dtype=torch.float64, **options)
        self.added, self.checkpointed = added, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.normalize, x, use_reentrant=False)
        return self.normalize(x)

    def normalize(self, x: Tensor) -> Tensor:
        return self.norm(x, x.sin() if self.added else None)


def small_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Two blocks of convolution, norm and activation; the second's is fused."""
    torch.manual_seed(1)
    first = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    second = [nn.Conv2d(4, 5, 3), SyncBatchNorm(5, activation="relu")]
    return convert_sync_batchnorm(nn.Sequential(*first, *second)).to(dtype)


Call = Callable[[Tensor], Tensor]
Results = list[dict[str, Tensor]]


def plainly(call: Call) -> Call:
    return call


def steps(
    call: Call,
    model: nn.Module,
    xs: Sequence[Tensor],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Results:
    """Output, gradients and state in each of several training steps, a batch for each."""
    results = []
    for x in xs:
        x = x.detach().requires_grad_()
        model.zero_grad()
        with context():
            y = call(x)
        y.cos().sum().backward()
        gradients = {f"grad_{name}": p.grad for name, p in model.named_parameters()}
        state = {name: t.clone() for name, t in model.state_dict().items()}
        results.append({"y": y.detach(), "dx": x.grad, **gradients, **state})
    return results


def assert_as_eager(
    model: nn.Module,
    compiler: str,
    xs: Sequence[Tensor],
    around: Callable[[Call], Call] = plainly,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    tolerance: dict[str, float] = FP64,
) -> int:
    """Compares steps of a model with those of it compiled; returns how often that was.

    ``around`` wraps the model, compiled or not, in what calls it.
    """
    torch._dynamo.reset()
    counters.clear()
    eager, counted = copy.deepcopy(model), CompileCounterWithBackend(compiler)
    compiled = torch.compile(model, fullgraph=True, backend=counted)
    actual = steps(around(compiled), model, xs, context)
    right = steps(around(eager), eager, xs, context)
    torch.testing.assert_close(actual, right, **tolerance)
    assert not counters["graph_break"]
    return counted.frame_count


def batches(splits: Sequence[tuple[int, ...]], *size: int) -> list[list[Tensor]]:
    """For each rank, its batch in each step."""
    of_steps = [randn(sum(split), *size).split(split) for split in splits]
    return [list(of_rank) for of_rank in zip(*of_steps, strict=True)]


def features_on_rank(rank: int, compiler: str, names: list[str], xs: list[list[Tensor]]) -> None:
    for name in names:
        assert assert_as_eager(Block(*FEATURES[name]), compiler, xs[rank]) <= 2, name


@pytest.mark.parametrize(
    ("compiler", "splits", "names"),
    [
        ("aot_eager", DYNAMIC, list(FEATURES)),
        ("eager", DYNAMIC, ["momentum=None", "relu, residual"]),
        ("aot_eager", STATIC, ["plain"]),
        ("aot_eager", ONE_EMPTY, ["momentum=None", "relu, residual"]),
        *(pytest.param("inductor", DYNAMIC, [n], marks=pytest.mark.slow) for n in FEATURES),
    ],
    ids=str,
)
def test_features(
    ranks: RankPool, compiler: str, splits: list[tuple[int, ...]], names: list[str]
) -> None:
    """Batches that change size are compiled once more, and then never."""
    xs = batches(splits, 3, 4)
    ranks.run(2, features_on_rank, compiler, names, xs, timeout=TIMEOUT)


def test_features_through_the_kernels(ranks: RankPool) -> None:
    arguments = ("aot_eager", ["momentum=None", "relu, residual"], batches(STATIC, 3, 4))
    ranks.run(2, features_on_rank, *arguments, backend="triton", timeout=TIMEOUT)


def around_a_checkpoint(call: Call) -> Call:
    return partial(checkpoint, call, use_reentrant=False)


def checkpoints_on_rank(rank: int, compiler: str, inside: bool, xs: list[list[Tensor]]) -> None:
    for name in ("momentum=None", "relu, residual"):
        block = Block(*FEATURES[name], checkpointed=inside)
        around = plainly if inside else around_a_checkpoint
        assert_as_eager(block, compiler, xs[rank], around)
        assert block.norm.num_batches_tracked == 3


@pytest.mark.parametrize(
    ("compiler", "inside"),
    [
        # Not "eager" with a checkpoint inside, where torch's own layer fails: a buffer is an
        # argument of the checkpoint, and is changed in it.
        ("eager", False),
        ("aot_eager", False),
        ("aot_eager", True),
        pytest.param("inductor", False, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_counts_a_step_once(ranks: RankPool, compiler: str, inside: bool) -> None:
    """Inside the graph or around it: a graph cannot tell by itself that it runs again."""
    xs = batches(STATIC, 3, 4)
    ranks.run(2, checkpoints_on_rank, compiler, inside, xs, timeout=TIMEOUT)


def net_on_rank(
    rank: int, compiler: str, xs: list[list[Tensor]], memory_format: torch.memory_format
) -> int:
    own = [x.contiguous(memory_format=memory_format) for x in xs[rank]]
    return assert_as_eager(small_net().to(memory_format=memory_format), compiler, own)


@pytest.mark.parametrize(
    ("compiler", "memory_format"),
    [
        ("aot_eager", torch.contiguous_format),
        ("aot_eager", torch.channels_last),
        pytest.param("inductor", torch.channels_last, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_several_layers(ranks: RankPool, compiler: str, memory_format: torch.memory_format) -> None:
    arguments = (compiler, batches(DYNAMIC, 3, 6, 6), memory_format)
    assert max(ranks.run(2, net_on_rank, *arguments, timeout=TIMEOUT)) <= 2


def test_several_layers_are_one_graph() -> None:
    torch._dynamo.reset()
    explained = torch._dynamo.explain(small_net())(randn(2, 3, 6, 6))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.slow
def test_reduce_overhead() -> None:
    torch._dynamo.reset()
    model, xs = Block(*FEATURES["relu, residual"]), batches(STATIC, 3, 4)[1]
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    actual, right = steps(compiled, model, xs), steps(eager, eager, xs)
    torch.testing.assert_close(actual, right, **FP64)


@pytest.mark.parametrize(
    ("dtype", "activation"), [(torch.float16, None), (torch.bfloat16, "relu")], ids=str
)
def test_half_precision(dtype: torch.dtype, activation: str | None) -> None:
    """Bitwise: nothing is fused into what rounds."""
    model = Block({"activation": activation}, added=True).to(dtype)
    xs = [x.to(dtype) for x in batches(DYNAMIC, 3, 4)[0]]
    assert_as_eager(model, "aot_eager", xs, tolerance={"rtol": 0, "atol": 0})


BF16 = partial(torch.autocast, "cpu", torch.bfloat16)


class UnderAutocast(nn.Module):
    """A model whose forward switches autocast on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with BF16():
            return self.model(x)


@pytest.mark.parametrize("inside", [True, False], ids=["inside the graph", "around it"])
def test_autocast(inside: bool) -> None:
    """Half-precision input of fp32 layers; bitwise."""
    model, context = small_net(torch.float32), BF16
    if inside:
        model, context = UnderAutocast(model), nullcontext
    xs = [x.float() for x in batches(DYNAMIC, 3, 6, 6)[0]]
    assert_as_eager(model, "aot_eager", xs, context=context, tolerance={"rtol": 0, "atol": 0})


def test_functional_call() -> None:
    """The tensors given are updated, also compiled, and those of the module left alone."""
    torch._dynamo.reset()
    module, x = Block(*FEATURES["momentum=None"]), randn(4, 3, 2)
    call = partial(torch.func.functional_call, module)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    ours, right = ({n: t.detach().clone() for n, t in module.state_dict().items()} for _ in "ab")
    for n in (4, 5, 6):
        x = randn(n, 3, 2)
        torch.testing.assert_close(compiled(ours, (x,)), call(right, (x,)), **FP64)
        torch.testing.assert_close(ours, right, **FP64)
    assert ours["norm.num_batches_tracked"] == 3
    assert module.norm.num_batches_tracked == 0


class Branches(nn.Module):
    """Norms of 3 channels, then of 4 and 5 side by side, then of 6."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norms = nn.ModuleList([SyncBatchNorm(C) for C in (3, 4, 5)])
        self.last = SyncBatchNorm(6, activation="silu")
        self.convs = nn.ModuleList([nn.Conv1d(3, 4, 1), nn.Conv1d(3, 5, 1)])
        self.joins = nn.ModuleList([nn.Conv1d(4, 6, 1), nn.Conv1d(5, 6, 1)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](x)
        four, five = (norm(conv(x)) for norm, conv in zip(self.norms[1:], self.convs, strict=True))
        return self.last(self.joins[1](five), self.joins[0](four))


def collectives(function: Callable[[], None]) -> list[int]:
    """Sizes of the all-reduces that a function makes, in their order."""
    with torch.autograd.profiler.profile(record_shapes=True, use_kineto=False) as profile:
        function()
    events = sorted(profile.function_events, key=lambda event: event.time_range.start)
    return [event.input_shapes[0][0] for event in events if event.name == "gloo:all_reduce"]


def collectives_on_rank(rank: int, compiler: str, xs: list[Tensor]) -> list[list[int]]:
    """Of two steps each, uncompiled and compiled, with gradients that differ among ranks."""
    torch._dynamo.reset()
    eager = Branches()
    if rank == 1:
        # Only the biases, so that every norm still runs backward; its input needs no gradient.
        for name, parameter in eager.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    made, gradients = [], []
    for call, parameters in ((eager, eager.parameters()), (compiled, model.parameters())):

        def step(call: Call = call) -> None:
            call(xs[rank].clone().requires_grad_(rank == 0)).cos().sum().backward()

        made += [collectives(step), collectives(step)]
        gradients.append([p.grad for p in parameters])
    torch.testing.assert_close(*gradients, **FP64)
    return made


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_collectives_in_program_order(ranks: RankPool, compiler: str) -> None:
    """Also on a rank whose graph differs, and where no data flows from one to the next."""
    xs = randn(5, 3, 4).split((2, 3))
    forward, backward = [2 * C + 1 for C in (3, 4, 5, 6)], [2 * C for C in (6, 5, 4, 3)]
    for made in ranks.run(2, collectives_on_rank, compiler, xs, timeout=TIMEOUT):
        assert made == [forward + backward] * 4


def train(call: Call, model: nn.Module, xs: Sequence[Tensor]) -> dict[str, Tensor]:
    """State after steps of an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in xs:
        optimizer.zero_grad()
        call(x).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def ddp_on_rank(rank: int, compiler: str, outside: bool, xs: list[list[Tensor]]) -> int:
    torch._dynamo.reset()
    # Buckets of some 400 bytes, the first of no more: there are several.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 400
    wrap = partial(DistributedDataParallel, bucket_cap_mb=4e-4)
    eager, model, counted = small_net(), small_net(), CompileCounterWithBackend(compiler)
    if outside:
        # DistributedDataParallel breaks the graph itself.
        compiled = torch.compile(wrap(model), backend=counted)
    else:
        compiled = wrap(torch.compile(model, fullgraph=True, backend=counted))
    actual = train(compiled, model, xs[rank])
    torch.testing.assert_close(actual, train(wrap(eager), eager, xs[rank]), **FP64)
    return counted.frame_count


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("outside", [False, True], ids=["DDP(compiled)", "compiled(DDP)"])
def test_under_ddp(ranks: RankPool, compiler: str, outside: bool) -> None:
    arguments = (compiler, outside, batches(STATIC, 3, 6, 6))
    # Under DistributedDataParallel, torch compiles a graph for each bucket unless told otherwise.
    assert min(ranks.run(2, ddp_on_rank, *arguments, timeout=TIMEOUT)) > 1
