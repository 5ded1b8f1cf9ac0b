"""Users' cases: a layer copied, saved, loaded, exported, and run where there is one process."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from test_cases_layout import FP64, randn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn

from syncbn_triton import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def copies_share_the_group(rank: int, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    group = dist.new_group([0, 1])
    model = nn.Sequential(SyncBatchNorm(3, process_group=group), nn.BatchNorm1d(3))
    duplicates = duplicate(convert_sync_batchnorm(model, group))
    assert [layer.process_group for layer in duplicates] == [group, group]
    assert type(revert_sync_batchnorm(duplicates)[1]) is nn.BatchNorm1d


def each_layer_copied(model: nn.Module) -> nn.Module:
    return nn.Sequential(*(copy.copy(layer) for layer in model))


def averaged(model: nn.Module) -> nn.Module:
    return AveragedModel(model).module


@pytest.mark.parametrize("duplicate", [copy.deepcopy, each_layer_copied, averaged])
def test_v9_a_copy_shares_the_group(
    ranks: RankPool, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    """mmengine#1664, yolov5#279."""
    ranks.run(2, copies_share_the_group, duplicate)


def test_v9_a_deep_copy_has_its_own_state() -> None:
    layer = SyncBatchNorm(3)
    copied = copy.deepcopy(layer)
    copied(torch.randn(4, 3))
    nn.init.zeros_(copied.weight)
    assert layer.num_batches_tracked == 0
    assert layer.weight.tolist() == [1.0] * 3


def the_group_is_dropped_on_load(
    rank: int, duplicate: Callable[[nn.Module], nn.Module], x: Tensor
) -> None:
    group = dist.new_group([0, 1])
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), group)
    model(x)
    with pytest.warns(UserWarning, match="set its process_group") as caught:
        loaded = duplicate(model)
    assert len(caught) == 1
    assert model[0].process_group is group
    assert loaded[0].process_group is None
    assert "_had_process_group" not in vars(loaded[0])
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert type(revert_sync_batchnorm(loaded)[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("duplicate", [pickled, saved_and_loaded])
def test_v9_the_group_is_dropped_on_load(
    ranks: RankPool, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    ranks.run(2, the_group_is_dropped_on_load, duplicate, torch.randn(4, 3))


@pytest.mark.parametrize("duplicate", [pickled, saved_and_loaded, copy.deepcopy, copy.copy])
def test_v9_nothing_is_said_without_a_group(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    layer, x = convert_sync_batchnorm(nn.BatchNorm1d(3)), torch.randn(4, 3)
    duplicated = duplicate(layer)
    assert vars(duplicated).keys() == vars(layer).keys()
    assert torch.equal(duplicated(x), layer(x))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"bias": False},
    {"track_running_stats": False},
    {"momentum": None, "dtype": torch.float64},
]
OTHERS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, SyncBatchNorm]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("other", OTHERS)
def test_v10_state_loads_strictly_both_ways(
    other: type[nn.Module], options: dict[str, Any]
) -> None:
    for source, target in (
        (SyncBatchNorm(3, **options), other(3, **options)),
        (other(3, **options), SyncBatchNorm(3, **options)),
    ):
        with torch.no_grad():
            for i, tensor in enumerate(source.state_dict().values()):
                tensor.fill_(i + 2)
        target.load_state_dict(source.state_dict(), strict=True)
        torch.testing.assert_close(target.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_v10_checkpoints_from_before_there_was_a_counter() -> None:
    """Those of torch before 0.4.1; newer ones that lack it are incomplete."""
    model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    state = model.state_dict()
    state["1.running_mean"] = torch.ones(3)
    del state["1.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.num_batches_tracked"):
        model.load_state_dict(state)
    state._metadata["1"]["version"] = 1
    model.load_state_dict(state)
    model.load_state_dict(dict(state))
    assert model[1].num_batches_tracked == 0
    assert model[1].running_mean.tolist() == [1.0] * 3


def trained_model(**options: Any) -> nn.Module:
    """In evaluation, with running statistics that are not those of a new layer."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **options), nn.ReLU())
    convert_sync_batchnorm(model)(torch.randn(4, 3, 6, 6))
    return model.eval()


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_v11_export(options: dict[str, Any]) -> None:
    """pytorch#82464."""
    assert not dist.is_initialized()
    model, x = trained_model(**options), torch.randn(2, 3, 6, 6)
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(model, (x,), dynamic_shapes=(batch,))
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.batch_norm.default in called
    assert {target.namespace for target in called} == {"aten"}
    for n in (2, 5):
        x = torch.randn(n, 3, 6, 6)
        torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_v11_trace(options: dict[str, Any]) -> None:
    """Without a TracerWarning, as torch's own layer."""
    model = trained_model(**options)
    traced = torch.jit.trace(model, (torch.randn(2, 3, 6, 6),))
    assert "aten::batch_norm" in str(traced.inlined_graph)
    assert "syncbn_triton::" not in str(traced.inlined_graph)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(torch.jit.load(file)(x), model(x))


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_v11_script_after_revert(training: bool) -> None:
    model, x = trained_model(), torch.randn(2, 3, 6, 6)
    reverted = revert_sync_batchnorm(copy.deepcopy(model)).train(training)
    torch.testing.assert_close(torch.jit.script(reverted)(x), model.train(training)(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_v11_onnx(tmp_path: Path) -> None:
    """The graph is that of torch's own layer."""
    reason = "torch.onnx.export needs the packages onnx and onnxscript"
    onnx = pytest.importorskip("onnx", reason=reason)
    pytest.importorskip("onnxscript", reason=reason)

    def operators(model: nn.Module) -> list[tuple[str, str]]:
        file = tmp_path / "model.onnx"
        torch.onnx.export(model, (torch.randn(2, 3, 6, 6),), file, dynamo=True)
        return [(node.domain, node.op_type) for node in onnx.load(file).graph.node]

    model = trained_model()
    assert operators(model) == operators(revert_sync_batchnorm(model))


def train(model: nn.Module, xs: Tensor) -> dict[str, Tensor]:
    """State after steps whose loss is a mean over the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in xs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def perceptron(convert: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    return convert_sync_batchnorm(model) if convert else model


def train_with_ddp(rank: int, xs: list[Tensor]) -> dict[str, Tensor]:
    return train(DistributedDataParallel(perceptron(convert=True)), xs[rank])


def train_alone(rank: int, xs: list[Tensor]) -> dict[str, Tensor]:
    state = train(perceptron(convert=True), xs[rank])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SyncBatchNorm(3)(torch.randn(1, 3))
    assert dist.group.WORLD._get_sequence_number_for_group() == 0
    return state


@pytest.mark.parametrize(
    ("function", "world_size"), [(train_with_ddp, 2), (train_with_ddp, 1), (train_alone, 1)]
)
def test_v12_training_on_the_cpu(
    ranks: RankPool, function: Callable[..., dict[str, Tensor]], world_size: int
) -> None:
    """mmseg#387, FB-BEV#62."""
    xs = randn(4, 6, 3)
    right = train(perceptron(convert=False), xs)
    for state in ranks.run(world_size, function, xs.chunk(world_size, dim=1)):
        torch.testing.assert_close(state, right, **FP64)


def test_v12_training_without_a_process_group(backend: str) -> None:
    assert not dist.is_initialized()
    xs = randn(4, 6, 3)
    ours, torchs = (train(perceptron(convert), xs) for convert in (True, False))
    torch.testing.assert_close(ours, torchs, **FP64)


def test_v12_statistics_are_renewed_for_averaged_weights() -> None:
    """What torch's own helper does to every batch norm, found by its base class."""
    ours, torchs = perceptron(convert=True), perceptron(convert=False)
    batches = randn(3, 6, 3)
    for model in (ours, torchs):
        update_bn(batches, model)
    torch.testing.assert_close(ours.state_dict(), torchs.state_dict(), **FP64)
    assert ours[1].num_batches_tracked == 3
