"""A fused module keeps its hooks, its class and the modes of its layers."""

import pytest
from fusible import Bottleneck, ResNet, converted, images

from syncbn_triton import fuse_activations

pytestmark = pytest.mark.usefixtures("aten")


def test_hooks_flags_and_class_of_a_rewritten_module() -> None:
    model, calls = converted(Bottleneck(3, 3)), []
    handle = model.register_forward_hook(lambda *_: calls.append("hook"))
    model.bn1.eval()
    fuse_activations(model)
    assert isinstance(model, Bottleneck)
    assert type(model).__name__ == "FusedBottleneck"
    assert [model.training, model.bn1.training] == [True, False]
    model(images())
    handle.remove()
    model(images())
    assert calls == ["hook"]


def test_hooks_on_containers() -> None:
    """One that has a hook is left whole, one that gets a hook later still calls it."""
    hooked, later, calls = converted(Bottleneck(3, 3)), converted(ResNet()), []
    hooked.downsample.register_forward_hook(lambda *_: calls.append("before"))
    fuse_activations(hooked)
    hooked(images())
    fuse_activations(later)
    for container in (later.layer1, later.layer2[0].downsample):
        container.register_forward_hook(lambda *_: calls.append("later"))
    later(images())
    assert calls == ["before", "later", "later"]
