"""Sizes that batch normalization meets in networks that people train, each with its source."""

from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """An input ``(N, C, *)`` of one rank, and the network it occurs in."""

    name: str
    size: tuple[int, ...]
    source: str


_RESNET = "He et al. 2016, ResNet-50, 224 x 224, batch 32"
_DETECTION = "Ren et al. 2015, Faster R-CNN with ResNet-50, 800 x 1333, batch 2"

SUITE: tuple[Shape, ...] = (
    Shape("resnet50 stem", (32, 64, 112, 112), f"{_RESNET}, conv1"),
    Shape("resnet50 64x56", (32, 64, 56, 56), f"{_RESNET}, stage 1, inside a block"),
    Shape("resnet50 256x56", (32, 256, 56, 56), f"{_RESNET}, stage 1, end of a block"),
    Shape("resnet50 128x56", (32, 128, 56, 56), f"{_RESNET}, stage 2, before its stride"),
    Shape("resnet50 128x28", (32, 128, 28, 28), f"{_RESNET}, stage 2, inside a block"),
    Shape("resnet50 512x28", (32, 512, 28, 28), f"{_RESNET}, stage 2, end of a block"),
    Shape("resnet50 256x28", (32, 256, 28, 28), f"{_RESNET}, stage 3, before its stride"),
    Shape("resnet50 256x14", (32, 256, 14, 14), f"{_RESNET}, stage 3, inside a block"),
    Shape("resnet50 1024x14", (32, 1024, 14, 14), f"{_RESNET}, stage 3, end of a block"),
    Shape("resnet50 512x14", (32, 512, 14, 14), f"{_RESNET}, stage 4, before its stride"),
    Shape("resnet50 512x7", (32, 512, 7, 7), f"{_RESNET}, stage 4, inside a block"),
    Shape("resnet50 2048x7", (32, 2048, 7, 7), f"{_RESNET}, stage 4, end of a block"),
    Shape("detection 64x400", (2, 64, 400, 667), f"{_DETECTION}, conv1"),
    Shape("detection 256x200", (2, 256, 200, 334), f"{_DETECTION}, stage 1"),
    Shape("detection 512x100", (2, 512, 100, 167), f"{_DETECTION}, stage 2"),
    Shape("detection 1024x50", (2, 1024, 50, 84), f"{_DETECTION}, stage 3"),
    Shape("detection 2048x25", (2, 2048, 25, 42), f"{_DETECTION}, stage 4"),
    Shape("hrnet 48x128", (2, 48, 128, 256), "Wang et al. 2020, HRNetV2-W48, 512 x 1024, batch 2"),
    Shape("deeplab 256x128", (2, 256, 128, 256), "Chen et al. 2018, DeepLabv3+, decoder, batch 2"),
    Shape("deeplab 256x32", (2, 256, 32, 64), "Chen et al. 2017, DeepLabv3, ASPP, 512 x 1024"),
    Shape("vnet 16x128", (2, 16, 128, 128, 128), "Milletari et al. 2016, V-Net, 128^3, batch 2"),
    Shape("unet3d 32x192", (1, 32, 192, 192, 192), "Isensee et al. 2021, nnU-Net, 192^3, batch 1"),
    Shape("unet3d 320x6", (2, 320, 6, 6, 6), "Isensee et al. 2021, nnU-Net, 192^3, deepest"),
    Shape("yolo 32x320", (16, 32, 320, 320), "Redmon and Farhadi 2018, YOLOv3, 320 x 320, first"),
    Shape("yolo 1024x10", (16, 1024, 10, 10), "Redmon and Farhadi 2018, YOLOv3, 320 x 320, last"),
    Shape("mobilenet 24x56", (64, 24, 56, 56), "Sandler et al. 2018, MobileNetV2, a bottleneck"),
    Shape("mobilenet 144x56", (64, 144, 56, 56), "Sandler et al. 2018, MobileNetV2, expanded"),
    Shape("pillars", (30000, 64, 20), "Lang et al. 2019, PointPillars, 20 points each"),
    Shape("sparse points", (100000, 96), "Choy et al. 2019, MinkowskiUNet, sparse voxels"),
    Shape("simclr head", (512, 2048), "Chen et al. 2020, SimCLR, first layer of the projector"),
    Shape("byol head", (256, 4096), "Grill et al. 2020, BYOL, first layer of the projector"),
    Shape("barlow head", (128, 8192), "Zbontar et al. 2021, Barlow Twins, projector"),
    Shape("empty batch", (0, 256, 56, 56), "Wu et al. 2019, detectron2, a rank without samples"),
)

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def formats(shape: Shape) -> tuple[torch.memory_format, ...]:
    """Memory formats that exist for the size: contiguous, and channels-last for images."""
    last = _CHANNELS_LAST.get(len(shape.size))
    return (torch.contiguous_format,) if last is None else (torch.contiguous_format, last)
