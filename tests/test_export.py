"""An evaluating layer exported: torch's own batch norm, the residual and the activation after it.

`test_cases_life_cycle` exports layers without either.
"""

import io
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from syncbn_triton.kernels.epilogue import ACTIVATIONS
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm

CASES = [*product(ACTIVATIONS, [False, True]), (None, True)]


class Net(nn.Module):
    """A convolution and a layer, whose residual is another input."""

    def __init__(self, activation: str | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = SyncBatchNorm(4, activation=activation, negative_slope=0.2)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.norm(self.conv(x), residual)


def trained_net(activation: str | None) -> nn.Module:
    """In evaluation, with running statistics that are not those of a new layer."""
    net = Net(activation)
    net(torch.randn(4, 3, 6, 6))
    return net.eval()


def inputs(samples: int, added: bool) -> tuple[Tensor, ...]:
    x, residual = torch.randn(samples, 3, 6, 6), torch.randn(samples, 4, 4, 4)
    return (x, residual) if added else (x,)


@pytest.mark.parametrize(("activation", "added"), CASES)
def test_export(activation: str | None, added: bool) -> None:
    net = trained_net(activation)
    batch = {0: torch.export.Dim("batch")}
    shapes = (batch, batch) if added else (batch,)
    program = torch.export.export(net, inputs(2, added), dynamic_shapes=shapes)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert torch.ops.aten.batch_norm.default in called
    assert {target.namespace for target in called} == {"aten"}
    # Convolution and norm, and an operator for each of the others.
    assert len(called) == 2 + added + (activation is not None)
    for samples in (2, 5):
        arguments = inputs(samples, added)
        torch.testing.assert_close(program.module()(*arguments), net(*arguments))


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("activation", "added"), CASES)
def test_trace(activation: str | None, added: bool) -> None:
    net = trained_net(activation)
    traced = torch.jit.trace(net, inputs(2, added))
    assert "aten::batch_norm" in str(traced.inlined_graph)
    assert "syncbn_triton::" not in str(traced.inlined_graph)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    arguments = inputs(5, added)
    torch.testing.assert_close(torch.jit.load(file)(*arguments), net(*arguments))


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.parametrize(("activation", "added"), CASES)
def test_onnx(tmp_path: Path, activation: str | None, added: bool) -> None:
    """Standard operators only; what they compute, where there is a runtime."""
    reason = "torch.onnx.export needs the packages onnx and onnxscript"
    onnx = pytest.importorskip("onnx", reason=reason)
    pytest.importorskip("onnxscript", reason=reason)
    net, arguments, file = trained_net(activation), inputs(2, added), tmp_path / "net.onnx"
    torch.onnx.export(net, arguments, file, dynamo=True)
    assert {node.domain for node in onnx.load(file).graph.node} <= {"", "ai.onnx"}
    runtime = pytest.importorskip("onnxruntime", reason="running a model needs onnxruntime")
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    given: dict[str, Any] = {n: t.numpy() for n, t in zip(names, arguments, strict=True)}
    (y,) = session.run(None, given)
    torch.testing.assert_close(torch.from_numpy(y), net(*arguments), rtol=1e-5, atol=1e-5)
