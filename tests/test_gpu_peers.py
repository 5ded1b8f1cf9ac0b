"""`bench/gpu_peers.py` calls torch's operators as torch does, here their stand-ins on the CPU."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_stand_ins import CPU, STAND_INS, TINY

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import gpu_peers
from gpu_cases import CONTIGUOUS, LAST


@pytest.mark.parametrize("stand_in", STAND_INS, ids=lambda f: f.__name__)
def test_stand_ins_take_what_the_operators_take(stand_in: Callable[..., Any]) -> None:
    schema = getattr(torch.ops.aten, stand_in.__name__).default._schema
    assert list(inspect.signature(stand_in).parameters) == [a.name for a in schema.arguments]
    outputs = str(inspect.signature(stand_in).return_annotation).count("Tensor")
    assert max(outputs, 1) == len(schema.returns)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("memory_format", [CONTIGUOUS, LAST], ids=str)
def test_the_operator_sequence_is_batch_norm(memory_format: torch.memory_format) -> None:
    layer, twin = gpu_peers.SequenceLayer(5), gpu_peers.native(5, 4, CPU)
    x = torch.randn(TINY).contiguous(memory_format=memory_format).requires_grad_()
    dy = torch.randn(TINY)
    for _ in range(2):
        results = []
        for module in (layer, twin):
            y = module(x)
            results.append([y, *torch.autograd.grad(y, [x, module.weight, module.bias], dy)])
        torch.testing.assert_close(*results)
    torch.testing.assert_close(layer.state_dict(), twin.state_dict())
