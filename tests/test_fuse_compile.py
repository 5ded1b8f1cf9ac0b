"""A fused model compiles into one graph."""

import copy

import pytest
import torch
from fusible import Bottleneck, converted, images, step

from syncbn_triton import fuse_activations

pytestmark = pytest.mark.usefixtures("aten")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*there are global hooks on modules:UserWarning")
def test_one_graph_of_torch_compile() -> None:
    model, x = converted(Bottleneck(3, 3)), images()
    right = step(copy.deepcopy(model), x)
    fuse_activations(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled.train()(x), right["y"], rtol=0, atol=1e-12)
