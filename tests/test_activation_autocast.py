"""A layer with an activation under autocast returns what torch's composition does."""

import pytest
import torch
from composed import EVERY, pair
from torch import nn

pytestmark = pytest.mark.usefixtures("aten")


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@EVERY
def test_autocast(activation: str | None, training: bool) -> None:
    """The layer gets what the convolution before it returns, and a shortcut in fp32 or as it."""
    conv = nn.Conv2d(3, 3, 3, padding=1)
    ours, composed = (module.train(training) for module in pair(activation))
    x = torch.randn(4, 3, 6, 6)
    for shortcut in (lambda x: x, conv):
        results = []
        for norm, layer in ((ours, ours), (composed, composed.norm)):
            layer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = norm(conv(x), shortcut(x))
            y.float().square().mean().backward()
            results.append((y, layer.weight.grad))
        (y, grad), (right, right_grad) = results
        assert y.dtype == right.dtype == (torch.float32 if shortcut is not conv else torch.bfloat16)
        bound = 4 * torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(y, right, rtol=bound, atol=bound)
        torch.testing.assert_close(grad, right_grad, rtol=bound, atol=bound)
