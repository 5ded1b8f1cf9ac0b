"""A layer with an activation compiles into one graph that computes what torch's does."""

import pytest
import torch
from composed import outcome, pair
from test_cases_layout import FP64, randn

pytestmark = pytest.mark.usefixtures("aten")


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
