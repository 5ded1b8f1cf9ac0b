"""Users' cases: memory layouts, shapes and options.

All in float64, where a wrong element cannot hide in rounding.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from oracle import Layer, Step, assert_step
from ranks import RankPool
from test_parity import build
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm

FP64 = {"rtol": 1e-12, "atol": 1e-12}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def randn(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64)


def channels_last(*size: int) -> Tensor:
    return randn(*size).contiguous(memory_format=CHANNELS_LAST[len(size)])


def random_layer(C: int) -> Layer:
    # With a small eps, dx of two values per channel is a difference of equal numbers.
    return Layer(randn(C).exp(), randn(C), randn(C), randn(C).exp(), eps=1.0)


def step_as_laid_out(layer: Layer, x: Tensor, dy: Tensor) -> Step:
    """One training step on tensors that nothing has made contiguous before."""
    module = build({"num_features": x.shape[1], "dtype": x.dtype, "eps": layer.eps}, layer)
    x = x.detach().requires_grad_()
    y = module(x)
    # Not x.grad, which autograd lays out as x whatever the layer returned.
    dx, grad_weight, grad_bias = torch.autograd.grad(y, (x, module.weight, module.bias), dy)
    return Step(y.detach(), dx, grad_weight, grad_bias, module.running_mean, module.running_var)


def step_on_rank_as_laid_out(rank: int, layer: Layer, xs: list[Tensor], dys: list[Tensor]) -> Step:
    return step_as_laid_out(layer, xs[rank], dys[rank])


def together(steps: list[Step]) -> Step:
    """The step of all ranks: samples one after the other, gradients of parameters in sum."""
    return Step(
        y=torch.cat([s.y for s in steps]),
        dx=torch.cat([s.dx for s in steps]),
        grad_weight=torch.stack([s.grad_weight for s in steps]).sum(0),
        grad_bias=torch.stack([s.grad_bias for s in steps]).sum(0),
        running_mean=steps[0].running_mean,
        running_var=steps[-1].running_var,
    )


def assert_format(step: Step, memory_format: torch.memory_format) -> None:
    assert step.y.is_contiguous(memory_format=memory_format)
    assert step.dx.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 2, 2, 2), (1, 2, 3, 3), (3, 33, 2, 2)])
@pytest.mark.parametrize("x_last", [False, True], ids=["x contiguous", "x channels-last"])
def test_l1_gradient_of_another_format(backend: str, size: tuple[int, ...], x_last: bool) -> None:
    """pytorch#64039."""
    layer, x, dy = random_layer(size[1]), randn(*size), randn(*size)
    formats = [torch.contiguous_format, CHANNELS_LAST[len(size)]]
    x = x.contiguous(memory_format=formats[x_last])
    dy = dy.contiguous(memory_format=formats[not x_last])
    step = step_as_laid_out(layer, x, dy)
    assert_step(step, layer, x, dy)
    assert_format(step, formats[x_last])


@pytest.mark.parametrize("implementation", ["aten", "triton"])
def test_l1_ranks_of_different_formats(ranks: RankPool, implementation: str) -> None:
    layer, x, dy = random_layer(3), randn(5, 3, 4, 4), randn(5, 3, 4, 4)
    formats = [torch.contiguous_format, torch.channels_last]
    xs = [t.contiguous(memory_format=f) for t, f in zip(x.split((2, 3)), formats, strict=True)]
    dys = [
        t.contiguous(memory_format=f)
        for t, f in zip(dy.split((2, 3)), reversed(formats), strict=True)
    ]
    steps = ranks.run(2, step_on_rank_as_laid_out, layer, xs, dys, backend=implementation)
    for step, memory_format in zip(steps, formats, strict=True):
        assert_format(step, memory_format)
    assert_step(together(steps), layer, x, dy)


VIEWS: dict[str, Callable[[], Tensor]] = {
    "permuted": lambda: randn(2, 4, 3, 5).permute(0, 2, 1, 3),
    "transposed": lambda: randn(3, 5, 4).transpose(1, 2),
    "transposed 2-D": lambda: randn(3, 6).t(),
    "transposed image": lambda: randn(2, 3, 4, 5).transpose(2, 3),
    "batch innermost": lambda: randn(3, 4, 5, 2).permute(3, 0, 1, 2),
    "permuted 5-D": lambda: randn(2, 3, 2, 4, 3).permute(0, 4, 2, 1, 3),
    "every other channel": lambda: randn(2, 6, 4)[:, ::2],
    "every other channel, channels-last": lambda: channels_last(2, 6, 4, 4)[:, ::2],
    "every other sample": lambda: randn(6, 3, 4)[::2],
    "every other pixel": lambda: randn(2, 3, 5, 6)[..., ::2, ::2],
    "cropped": lambda: randn(2, 3, 6, 6)[..., 1:-1, 1:-1],
    "cropped, channels-last": lambda: channels_last(2, 3, 6, 6)[..., 1:-1, 1:-1],
    "expanded over the batch": lambda: randn(1, 3, 4).expand(3, 3, 4),
    "expanded over channels": lambda: randn(4, 1, 5).expand(4, 3, 5),
    "expanded over space": lambda: randn(4, 3, 1, 2).expand(4, 3, 5, 2),
    "overlapping windows": lambda: randn(2, 3, 6).unfold(2, 3, 1),
}


@pytest.mark.parametrize("dy_as_x", [False, True], ids=["dy contiguous", "dy as x"])
@pytest.mark.parametrize("name", VIEWS)
def test_l2_views(backend: str, name: str, dy_as_x: bool) -> None:
    """pytorch#62967."""
    x = VIEWS[name]()
    dy = VIEWS[name]() if dy_as_x else randn(*x.shape)
    layer = random_layer(x.shape[1])
    assert_step(step_as_laid_out(layer, x, dy), layer, x, dy)


@pytest.mark.parametrize("size", [(2, 3, 2, 2, 2), (2, 17, 1, 2, 3), (2, 3, 4, 5), (3, 65, 2, 1)])
def test_l3_channels_last_is_kept(backend: str, size: tuple[int, ...]) -> None:
    """pytorch#107199."""
    layer, x, dy = random_layer(size[1]), channels_last(*size), channels_last(*size)
    assert not x.is_contiguous()
    step = step_as_laid_out(layer, x, dy)
    assert_step(step, layer, x, dy)
    assert_format(step, CHANNELS_LAST[len(size)])


@pytest.mark.parametrize("size", [(2, 6, 3, 4), (2, 6, 2, 2, 3)])
def test_l3_channels_last_is_kept_for_a_part_of_a_tensor(
    backend: str, size: tuple[int, ...]
) -> None:
    """Branches of a block split by channels, and crops, as torch's own layer keeps them."""
    whole = channels_last(*size)
    for x in (*whole.chunk(2, dim=1), whole[..., 1:], whole[:, ::2]):
        layer, dy = random_layer(x.shape[1]), randn(*x.shape)
        assert_format(step_as_laid_out(layer, x, dy), CHANNELS_LAST[len(size)])


@pytest.mark.parametrize(
    "size",
    [
        (2, 3, 1, 1),
        (2, 1, 4, 4),
        (1, 3, 2, 2),
        (1, 1, 2, 3),
        (8, 3),
        (8, 1),
        (8, 3, 5),
        (2, 3, 1),
        (2, 3, 2, 2, 3),
        (2, 1, 2, 1, 2),
        (2, 3, 1, 2, 1, 2),
    ],
    ids=str,
)
def test_l5_ranks_of_input(backend: str, size: tuple[int, ...]) -> None:
    layer, dy = random_layer(size[1]), randn(*size)
    for memory_format in (torch.contiguous_format, CHANNELS_LAST.get(len(size))):
        if memory_format is not None:
            x = randn(*size).contiguous(memory_format=memory_format)
            step = step_as_laid_out(layer, x, dy)
            assert step.y.shape == step.dx.shape == size
            assert_step(step, layer, x, dy)
            assert_format(step, memory_format)


def outcome(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Results of one step in the module's mode, and the state after it."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    gradients = {f"grad_{name}": p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients, **module.state_dict()}


AFFINE = ({}, {"affine": False, "eps": 0.5}, {"bias": False})
OPTIONS = [
    {"momentum": momentum, "track_running_stats": tracks, **affine}
    for momentum, tracks, affine in product((0.1, None), (True, False), AFFINE)
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_l8_every_option(
    backend: str, memory_format: torch.memory_format, options: dict[str, Any]
) -> None:
    """apex#913."""
    ours, torchs = (
        layer(3, dtype=torch.float64, **options) for layer in (SyncBatchNorm, nn.BatchNorm2d)
    )
    for parameter in torchs.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    ours.load_state_dict(torchs.state_dict())
    for training in (True, False):
        x, dy = (randn(2, 3, 2, 4).contiguous(memory_format=memory_format) for _ in range(2))
        actual, right = (outcome(layer.train(training), x, dy) for layer in (ours, torchs))
        torch.testing.assert_close(actual, right, **FP64)
        assert actual["y"].is_contiguous(memory_format=memory_format)


def test_l8_tracking_switched_off_later(backend: str) -> None:
    """The attribute, not what the layer was built with, decides in training."""
    ours, torchs = SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double()
    for _ in range(2):
        x = randn(4, 3, 5)
        torch.testing.assert_close(ours(x), torchs(x))
        ours.track_running_stats = torchs.track_running_stats = False
    torch.testing.assert_close(ours.eval()(x), torchs.eval()(x))
    torch.testing.assert_close(ours.state_dict(), torchs.state_dict())
