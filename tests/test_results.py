"""Networks under results/ are loaded as their pages say, and are as large as their tables say."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import squeeze_release as sr
from squeeze_release.recipes.vit import small_vit

RESULTS = Path(__file__).parents[1] / "results"


def convnext() -> nn.Module:
    return timm.create_model("convnext_tiny", num_classes=10)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "convnext-cifar10/best-2.safetensors": (convnext, "best/squeeze-release", "2"),
    "vit/best.safetensors": (small_vit, "best", "0"),
}


def test_all_are_here() -> None:
    assert {str(path.relative_to(RESULTS)) for path in RESULTS.glob("*/*.safetensors")} == {*NETWORKS}


@pytest.mark.parametrize("file", NETWORKS)
def test_a_network_is_as_its_page_says(file: str) -> None:
    build, config, seed = NETWORKS[file]
    small = sr.load(build(), RESULTS / file).eval()
    with (RESULTS / file).with_name("runs.csv").open(newline="") as table:
        (run,) = (row for row in csv.DictReader(table) if (row["config"], row["seed"]) == (config, seed))
    assert sum(parameter.numel() for parameter in small.parameters()) == int(run["deployable_params"])
    with torch.no_grad():
        y = small(torch.randn(2, 3, 64, 64))
    assert y.shape == (2, 10) and y.isfinite().all()
