"""Training recipes, one readable file each: `squeeze-release run NAME`, or `recipes.load(NAME).run(preset)`."""

from __future__ import annotations

import importlib
from types import ModuleType

RECIPES = {
    "fc-mnist": "a fully connected network on MNIST",
    "convnext-cifar10": "ConvNeXt-Tiny on CIFAR-10",
    "vit": "ViT-Small on ImageNet or CIFAR-10",
}


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
