"""The report of what was fused is a table, with a row for each layer."""

import pytest
from fusible import Bottleneck, InvertedResidual, converted
from torch import nn

from syncbn_triton import fuse_activations

pytestmark = pytest.mark.usefixtures("aten")


def test_the_report_is_a_table() -> None:
    model = converted(nn.Sequential(Bottleneck(3, 3), InvertedResidual(6, nn.Hardswish)))
    assert str(fuse_activations(model)).split("\n") == [
        "layer           activation  residual",
        "0.bn1           relu                  fused",
        "0.bn2           relu                  fused",
        "0.bn3           relu        yes       fused",
        "0.downsample.1                        is the residual of 0.bn3",
        "1.block.0.1     hardswish             fused",
        "1.block.1.1                           no activation follows that can be fused",
        "1.block.2.bn    relu                  fused",
        "1.block.3.1                           no activation follows in the same forward",
    ]
