"""Training recipes, one readable file each: `squeeze-release run NAME`, or `recipes.load(NAME).run(preset)`."""

from __future__ import annotations

import importlib
from types import ModuleType

RECIPES = {
    "fc-mnist": "a fully connected network on MNIST",
}


def load(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
