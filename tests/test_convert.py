"""Models with batch norms into models with synchronized ones, and back."""

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor, nn

import syncbn_triton
from syncbn_triton import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


class Block(nn.Module):
    """A residual block of the usual kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(self.conv(x)).relu()
        return self.head(x.mean((2, 3)))


class NormAndActivation(nn.BatchNorm2d):
    """A subclass whose forward does more than normalize."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_every_batch_norm_is_converted_in_place() -> None:
    model = Block()
    parameters = {name: id(p) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    assert convert_sync_batchnorm(model) is model
    assert type(model.norm) is type(model.head[1]) is SyncBatchNorm
    # An optimizer built before still updates the model.
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("original", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_a_single_layer_is_returned_new(original: type[nn.Module]) -> None:
    layer = original(3)
    converted = SyncBatchNorm.convert_sync_batchnorm(layer)
    assert type(layer) is original
    assert type(converted) is SyncBatchNorm
    assert converted.weight is layer.weight
    assert type(revert_sync_batchnorm(converted)) is original


def test_flags_options_and_hooks_are_kept() -> None:
    layer = nn.BatchNorm2d(3, eps=0.5, momentum=None, affine=True).eval()
    layer.weight.requires_grad_(False)
    layer.note = "kept"
    seen: list[str] = []
    handle = layer.register_forward_hook(lambda *_: seen.append("hook"))
    converted = convert_sync_batchnorm(layer)
    assert (converted.eps, converted.momentum, converted.training) == (0.5, None, False)
    assert not converted.weight.requires_grad
    assert converted.note == "kept"
    converted(torch.randn(2, 3, 4, 4))
    handle.remove()
    converted(torch.randn(2, 3, 4, 4))
    assert seen == ["hook"]


def test_a_layer_in_two_places_is_converted_once() -> None:
    shared = nn.BatchNorm2d(3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, shared)})
    convert_sync_batchnorm(model)
    assert type(model["a"]) is SyncBatchNorm
    assert model["a"] is model["b"][0] is model["b"][1]


def test_a_subclass_with_its_own_forward_is_left_alone() -> None:
    model = nn.Sequential(NormAndActivation(3))
    with pytest.warns(UserWarning, match="NormAndActivation has a forward of its own"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is NormAndActivation


def test_a_subclass_converts_to_itself() -> None:
    class Ours(SyncBatchNorm):
        pass

    assert type(Ours.convert_sync_batchnorm(nn.BatchNorm2d(3))) is Ours


def test_reverting_restores_classes_outputs_and_state() -> None:
    model = Block().eval()
    model(torch.randn(4, 3, 5, 5))
    x, keys = torch.randn(4, 3, 5, 5), list(model.state_dict())
    y = model(x)
    revert_sync_batchnorm(convert_sync_batchnorm(model))
    assert type(model.norm) is nn.BatchNorm2d
    assert type(model.head[1]) is nn.BatchNorm1d
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), y)
    assert not hasattr(model.norm, "process_group")
    assert "converted_from" not in vars(model.norm)


def test_reverting_a_layer_built_as_synchronized() -> None:
    layer = revert_sync_batchnorm(SyncBatchNorm(3))
    for size in [(4, 3), (4, 3, 5), (4, 3, 5, 5), (4, 3, 5, 5, 5)]:
        assert layer(torch.randn(size)).shape == size
    with pytest.raises(ValueError, match="at least 2D"):
        layer(torch.randn(3))


def test_torchs_class_converts_and_reverts() -> None:
    layer = convert_sync_batchnorm(nn.SyncBatchNorm(3))
    assert type(layer) is SyncBatchNorm
    assert type(revert_sync_batchnorm(layer)) is nn.SyncBatchNorm


def groups_survive(rank: int) -> None:
    """An explicit group is kept by a second conversion, unless it names another."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), first)
    assert convert_sync_batchnorm(model)[0].process_group is first
    assert convert_sync_batchnorm(model, second)[0].process_group is second
    assert convert_sync_batchnorm(nn.SyncBatchNorm(3, process_group=first)).process_group is first


def test_conversion_and_process_groups(ranks: RankPool) -> None:
    ranks.run(2, groups_survive)


def train_affine_in_a_group(rank: int, xs: list[Tensor]) -> tuple[Tensor, ...]:
    """A converted model with affine layers and a process group, as users of older layers write."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model = syncbn_triton.convert_sync_batchnorm(model, dist.new_group([0, 1]))
    y = model(xs[rank])
    y.square().sum().backward()
    return y.detach(), model[1].weight.grad, model[1].running_var


def test_a_converted_model_computes_what_one_process_does(ranks: RankPool) -> None:
    xs = torch.randn(6, 3, 8, 8).split((2, 4))
    results = ranks.run(2, train_affine_in_a_group, xs)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    y = model(torch.cat(xs))
    y.square().sum().backward()
    torch.testing.assert_close(torch.cat([r[0] for r in results]), y.detach())
    grad = model[1].weight.grad
    torch.testing.assert_close(sum(r[1] for r in results), grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(results[1][2], model[1].running_var)
