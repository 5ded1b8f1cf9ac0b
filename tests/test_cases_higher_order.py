"""Users' cases: gradients of gradients through statistics that ranks share (pytorch#61222).

On each rank, the gradient of its own loss is that of the sum of all ranks' losses with respect to
its own input, since all losses depend on it. So a penalty on it, summed over ranks, is what one
process computes on the whole batch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import Layer, assert_near
from ranks import RankPool
from test_cases_layout import FP64, randn
from test_parity import SPLITS, build
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm, convert_sync_batchnorm

Tensors = dict[str, Tensor]
CHANNELS = 3


def gathered(results: list[Tensors]) -> Tensors:
    """What all ranks found: of samples, one after the other; of parameters, in sum."""
    return {
        name: torch.cat([r[name] for r in results])
        if name in ("x", "dx")
        else sum(r[name] for r in results)
        for name in results[0]
    }


def penalty(y: Tensor, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a loss with respect to x, and how far its norm is from 1, over samples."""
    (dx,) = torch.autograd.grad((y.tanh() * direction).sum(), x, create_graph=True)
    return dx, (dx.flatten(1).norm(dim=1) - 1).square().sum()


def gradients_of_penalty(module: nn.Module, x: Tensor, direction: Tensor) -> Tensors:
    x = x.detach().requires_grad_()
    dx, loss = penalty(module(x), x, direction)
    loss.backward()
    return {"dx": dx.detach(), "x": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def penalize_on_rank(
    rank: int, options: dict[str, Any], layer: Layer, xs: list[Tensor], directions: list[Tensor]
) -> Tensors:
    return gradients_of_penalty(build(options, layer), xs[rank], directions[rank])


def layer_and_oracle(**options: Any) -> tuple[dict[str, Any], Layer, nn.Module]:
    """Options and state of a layer in fp64, and torch's layer in the same state."""
    options = {"num_features": CHANNELS, "dtype": torch.float64, **options}
    torchs = nn.BatchNorm2d(**options)
    for parameter in torchs.parameters():
        nn.init.normal_(parameter)
    layer = Layer(torchs.weight, torchs.bias, torchs.running_mean, torchs.running_var)
    return options, layer, torchs


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"affine": False}], ids=str)
@pytest.mark.parametrize("split", ["2 even", "2 uneven", "2, one empty"])
@pytest.mark.parametrize("implementation", ["aten", "triton"])
def test_l9_gradient_penalty(
    ranks: RankPool, implementation: str, split: str, options: dict[str, Any]
) -> None:
    options, layer, torchs = layer_and_oracle(**options)
    samples = SPLITS[split]
    x, direction = randn(2, sum(samples), CHANNELS, 2, 2)
    arguments = (options, layer, x.split(samples), direction.split(samples))
    results = ranks.run(len(samples), penalize_on_rank, *arguments, backend=implementation)
    torch.testing.assert_close(
        gathered(results), gradients_of_penalty(torchs, x, direction), **FP64
    )


@pytest.mark.parametrize("implementation", ["aten", "triton"])
def test_l9_gradient_penalty_in_channels_last(ranks: RankPool, implementation: str) -> None:
    options, layer, torchs = layer_and_oracle()
    x, direction = randn(2, 5, CHANNELS, 2, 3)
    xs = [t.contiguous(memory_format=torch.channels_last) for t in x.split((2, 3))]
    arguments = (options, layer, xs, direction.split((2, 3)))
    results = ranks.run(2, penalize_on_rank, *arguments, backend=implementation)
    torch.testing.assert_close(
        gathered(results), gradients_of_penalty(torchs, x, direction), **FP64
    )


@pytest.mark.parametrize("last", ["x", "dy"])
def test_l9_dx_keeps_the_format_of_x(backend: str, last: str) -> None:
    """As without a graph, whatever the format of dy."""
    formats = {"x": torch.contiguous_format, "dy": torch.contiguous_format}
    formats[last] = torch.channels_last
    x, dy = (torch.randn(2, CHANNELS, 4, 5).contiguous(memory_format=f) for f in formats.values())
    y = SyncBatchNorm(CHANNELS)(x.requires_grad_())
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    assert dx.is_contiguous(memory_format=formats["x"])


def critic() -> nn.Module:
    """Two layers, the second of which sees what the first made of all ranks' samples."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), nn.BatchNorm1d(3)
    ).double()


def penalize_critic_on_rank(rank: int, xs: list[Tensor], directions: list[Tensor]) -> Tensors:
    return gradients_of_penalty(convert_sync_batchnorm(critic()), xs[rank], directions[rank])


@pytest.mark.parametrize("split", [(3, 5), (6, 0), (2, 0, 4)], ids=str)
def test_l9_gradient_penalty_of_a_critic(ranks: RankPool, split: tuple[int, ...]) -> None:
    x, direction = randn(sum(split), 4), randn(sum(split), 3)
    results = ranks.run(len(split), penalize_critic_on_rank, x.split(split), direction.split(split))
    torch.testing.assert_close(
        gathered(results), gradients_of_penalty(critic(), x, direction), **FP64
    )


def penalize_parameter_gradients_on_rank(
    rank: int, options: dict[str, Any], layer: Layer, xs: list[Tensor], directions: list[Tensor]
) -> Tensors:
    module, x = build(options, layer), xs[rank].requires_grad_()
    loss = (module(x).tanh() * directions[rank]).sum()
    gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    sum(g.square().sum() for g in gradients).backward()
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def test_l9_penalty_on_the_gradients_of_parameters(ranks: RankPool) -> None:
    """They are a rank's own, so the one process that is compared with has parameters per rank."""
    split, (options, layer, _) = (2, 3), layer_and_oracle()
    x, direction = randn(2, 5, CHANNELS, 2, 2)
    arguments = (options, layer, x.split(split), direction.split(split))
    results = ranks.run(2, penalize_parameter_gradients_on_rank, *arguments)

    x.requires_grad_()
    weight, bias = (
        p.detach().expand(2, CHANNELS).clone().requires_grad_() for p in (layer.weight, layer.bias)
    )
    of_sample = torch.tensor([0, 0, 1, 1, 1])
    x_hat = F.batch_norm(x, None, None, training=True)
    y = x_hat * weight[of_sample, :, None, None] + bias[of_sample, :, None, None]
    gradients = torch.autograd.grad((y.tanh() * direction).sum(), (weight, bias), create_graph=True)
    sum(g.square().sum() for g in gradients).backward()
    right = {"x": x.grad, "weight": weight.grad.sum(0), "bias": bias.grad.sum(0)}
    torch.testing.assert_close(gathered(results), right, **FP64)


def penalize_where_one_input_needs_a_gradient(rank: int, xs: list[Tensor]) -> Tensor | None:
    module, x = SyncBatchNorm(CHANNELS).double(), xs[rank].requires_grad_(rank == 0)
    (dweight,) = torch.autograd.grad(module(x).tanh().sum(), module.weight, create_graph=True)
    dweight.square().sum().backward()
    return x.grad


def test_l9_one_rank_needs_no_gradient_of_its_input(ranks: RankPool) -> None:
    """Its samples still have a part in the second derivative at the other rank's input."""
    x = randn(5, CHANNELS)
    results = ranks.run(2, penalize_where_one_input_needs_a_gradient, x.split((2, 3)))

    x.requires_grad_()
    weight = torch.ones(2, CHANNELS, dtype=torch.float64, requires_grad=True)
    y = F.batch_norm(x, None, None, training=True) * weight[torch.tensor([0, 0, 1, 1, 1])]
    (dweight,) = torch.autograd.grad(y.tanh().sum(), weight, create_graph=True)
    dweight.square().sum().backward()
    torch.testing.assert_close(results[0], x.grad[:2], **FP64)


def second_derivatives(
    normalize: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, dy: Tensor, v: Tensor
) -> Tensors:
    """Gradients of ``(dx * v).sum()``."""
    x, dy = x.detach().requires_grad_(), dy.detach().requires_grad_()
    weight = torch.linspace(0.5, 1.5, CHANNELS).to(x.dtype).requires_grad_()
    y = normalize(x, weight, torch.ones_like(weight))
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    assert dx.dtype == x.dtype
    gradients = torch.autograd.grad(dx, (x, dy, weight), v)
    return dict(zip(("x", "dy", "weight"), gradients, strict=True))


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    module = SyncBatchNorm(CHANNELS, dtype=x.dtype)
    return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))


def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True)


@pytest.mark.parametrize(
    ("dtype", "mean"),
    [
        (torch.float16, 0.0),
        (torch.float16, 1e2),
        (torch.bfloat16, 0.0),
        (torch.float32, 0.0),
        (torch.float32, 1e4),
    ],
    ids=str,
)
def test_l9_lower_precision(backend: str, dtype: torch.dtype, mean: float) -> None:
    x, dy, v = ((torch.randn(16, CHANNELS, 5) + shift).to(dtype) for shift in (mean, 0, 0))
    exact = second_derivatives(torchs, x.double(), dy.double(), v.double())
    in_dtype = second_derivatives(torchs, x, dy, v)
    for name, value in second_derivatives(ours, x, dy, v).items():
        assert value.dtype == dtype
        assert_near(name, value, exact[name], in_dtype[name], dtype)
