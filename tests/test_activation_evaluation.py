"""In evaluation a fused residual and activation are torch's own operators, also exported."""

import pytest
import torch
from composed import EVERY, outcome, pair
from test_activation import CASES
from torch import Tensor, nn

from syncbn_triton import SyncBatchNorm

pytestmark = pytest.mark.usefixtures("aten")


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
