"""Whole networks compute what they did once their activations and sums are fused."""

import copy
import warnings

import pytest
import torch
from fusible import NETWORKS, assert_same, images, step
from oracle import assert_near
from torch import nn

from syncbn_triton import convert_sync_batchnorm, fuse_activations

pytestmark = pytest.mark.usefixtures("aten")


@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_computes_what_torchs_does(network: str) -> None:
    build, fused, residuals = NETWORKS[network]
    x = images()
    plain, x32 = build(), images(dtype=torch.float32)
    model = build().double()
    model.load_state_dict(plain.state_dict())
    exact = step(copy.deepcopy(model), x32.double())
    torchs = step(copy.deepcopy(plain), x32)
    right = step(copy.deepcopy(model), x)

    keys = list(model.state_dict())
    ids = {name: id(p) for name, p in model.named_parameters()}
    report = fuse_activations(convert_sync_batchnorm(model))
    assert (len(report.fused), sum(row.residual for row in report.fused)) == (fused, residuals)
    assert list(model.state_dict()) == keys
    assert {name: id(p) for name, p in model.named_parameters()} == ids
    assert_same(step(model, x), right)

    fuse_activations(convert_sync_batchnorm(plain))
    ours = step(plain, x32)
    for name in ("y", "evaluated"):
        assert_near(name, ours[name], exact[name], torchs[name], torch.float32)


def installed(package: str, name: str) -> nn.Module:
    """A network of a package that works with the installed torch, in double."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if package == "timm":
                import timm

                return timm.create_model(name).double()
            import torchvision

            return getattr(torchvision.models, name)(weights=None).double()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{package} cannot be imported: {error}")


@pytest.mark.parametrize(
    ("package", "name", "fused", "residuals"),
    [
        ("torchvision", "resnet50", 49, 16),
        ("torchvision", "mobilenet_v3_small", 23, 0),
        ("torchvision", "regnet_y_400mf", 49, 16),
        ("timm", "resnet26d", 27, 8),
        ("timm", "mobilenetv3_small_100", 0, 0),
    ],
)
def test_networks_of_packages(package: str, name: str, fused: int, residuals: int) -> None:
    model, x = installed(package, name), images(3, 3, 64, 64)
    torch.manual_seed(0)  # of dropout
    right = step(copy.deepcopy(model), x)
    rows = fuse_activations(convert_sync_batchnorm(model)).fused
    assert (len(rows), sum(row.residual for row in rows)) == (fused, residuals)
    torch.manual_seed(0)
    # So many layers enlarge roundings.
    assert_same(step(model, x), right, 1e-9)
