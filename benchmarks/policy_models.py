"""The networks of HOME's table 2 at the image shapes of CIFAR-10 and ImageNet, for the comparison of policies.

On CIFAR-10 shapes the stems keep the resolution, as is usual there, and VGG16 is the one with batch norm and a single
linear layer. HOME says neither its ResNet's depth nor its MobileNet's version: ResNet-18 (ImageNet: ResNet-50) and
MobileNetV2 stand here. InceptionV3 needs 75 pixels, so its CIFAR images are enlarged three times. Batches for CIFAR
are the paper's drivers' (InceptionV3's times two).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.workloads import Built, Classifier

SHAPES = ("cifar", "imagenet")
PLAIN_WIDTHS = {"cifar": (16, 32, 64), "imagenet": (64, 128, 256)}


@dataclass(frozen=True)
class PolicyModel:
    """`build(shapes)` makes the network; pixels and batch are per shape, on a GPU."""

    name: str
    build: Callable[[str], nn.Module]
    pixels: dict[str, int]
    batch: dict[str, int]


def build(name: str, shapes: str, device: torch.device, *, batch: int | None = None, autocast: bool = True) -> Built:
    """A training step (module that returns its loss) and its arguments, drawn on `device`; channels-last on CUDA."""
    made = MODELS[name]
    size, pixels = batch or made.batch[shapes], made.pixels[shapes]
    cuda = device.type == "cuda"
    with torch.device(device):
        model = made.build(shapes)
        images = torch.randn(size, 3, pixels, pixels)
        labels = torch.randint(0, 10 if shapes == "cifar" else 1000, (size,))
    if cuda:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    return Classifier(model, cuda and autocast), (images, labels)


def plain(shapes: str, layers: int = 20) -> nn.Module:
    """The plain network of He et al. (2016): convolutions of three widths without shortcuts, then one linear layer."""
    widths = PLAIN_WIDTHS[shapes]
    stem = widths[0]
    parts: list[nn.Module] = [*_unit(3, stem, 1)]
    if shapes == "imagenet":
        parts = [nn.Conv2d(3, stem, 7, 2, 3, bias=False), nn.BatchNorm2d(stem), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    inside = stem
    for width in widths:
        for i in range((layers - 2) // 3):
            parts += _unit(inside, width, 2 if i == 0 and width != stem else 1)
            inside = width
    classes = 10 if shapes == "cifar" else 1000
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


def _unit(inside: int, outside: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]


def _vgg16(shapes: str) -> nn.Module:
    from torchvision.models import vgg16, vgg16_bn

    if shapes == "imagenet":
        large: nn.Module = vgg16(weights=None)
        return large
    return nn.Sequential(vgg16_bn(weights=None).features, nn.Flatten(), nn.Linear(512, 10))


def _resnet(shapes: str) -> nn.Module:
    from torchvision.models import resnet18, resnet50

    if shapes == "imagenet":
        large: nn.Module = resnet50(weights=None)
        return large
    model: nn.Module = resnet18(weights=None, num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    return model


def _mobilenet(shapes: str) -> nn.Module:
    from torchvision.models import mobilenet_v2

    model: nn.Module = mobilenet_v2(weights=None, num_classes=10 if shapes == "cifar" else 1000)
    if shapes == "cifar":
        model.get_submodule("features.0").register_module("0", nn.Conv2d(3, 32, 3, 1, 1, bias=False))
    return model


def _squeezenet(shapes: str) -> nn.Module:
    from torchvision.models import squeezenet1_1

    model: nn.Module = squeezenet1_1(weights=None, num_classes=10 if shapes == "cifar" else 1000)
    if shapes == "cifar":
        model.get_submodule("features").register_module("0", nn.Conv2d(3, 64, 3, 1, 1))
    return model


def _inception(shapes: str) -> nn.Module:
    from torchvision.models import inception_v3

    large = shapes == "imagenet"
    model: nn.Module = inception_v3(
        weights=None, init_weights=False, aux_logits=large, num_classes=1000 if large else 10
    )
    return model


_SMALL = {"cifar": 32, "imagenet": 224}
_ALL = (
    PolicyModel("vgg16", _vgg16, _SMALL, {"cifar": 2560, "imagenet": 256}),
    PolicyModel("plain20", plain, _SMALL, {"cifar": 1024, "imagenet": 512}),
    PolicyModel("mobilenet", _mobilenet, _SMALL, {"cifar": 1280, "imagenet": 384}),
    PolicyModel("resnet", _resnet, _SMALL, {"cifar": 1280, "imagenet": 256}),
    PolicyModel("squeezenet", _squeezenet, _SMALL, {"cifar": 1280, "imagenet": 512}),
    PolicyModel("inception_v3", _inception, {"cifar": 96, "imagenet": 299}, {"cifar": 256, "imagenet": 128}),
    PolicyModel("tiny", lambda shapes: plain(shapes, 8), {"cifar": 16, "imagenet": 32}, {"cifar": 32, "imagenet": 16}),
)
MODELS = {model.name: model for model in _ALL}
