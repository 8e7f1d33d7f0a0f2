"""ConvNeXt-Tiny on CIFAR-10: the paper's second table.

    squeeze-release run convnext-cifar10 --preset paper --rules AB --start checkpoint.safetensors --run-dir runs/ab-0

Presets: `paper`, the published protocol, with --rules A or AB (the default); `short`, the same at 64 pixels and with
fewer epochs; `quick`, a small ConvNeXt on a few images; `best`, where whole channels go, of stem and stream too.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..cycle import Config, Result
from .images import Preset, run_preset
from .launch import Launch

# The paper prunes the depthwise convolutions by filters, and all Linear layers by elements; these it leaves alone.
UNTOUCHED = ("stem", "stages.1.downsample", "stages.2.downsample", "stages.3.downsample")
RATES = {"train": 1e-3, "prune": 1e-4, "finetune": 5e-5, "final": 5e-5}


def convnext(**arguments: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("convnext_tiny", num_classes=10, **arguments)
    return model


PRESETS = {
    "paper": Preset(
        Config(prune_epochs=100, finetune_epochs=20, final_epochs=20, skip=UNTOUCHED, rules="AB"),
        convnext, size=224, batch=64, rates=RATES, weight_decay=1e-2, pad=28,
    ),
    "quick": Preset(
        Config(train_epochs=3, prune_epochs=4, finetune_epochs=1, final_epochs=1, max_cycles=2, threshold=0.11,
               max_drop=1.0, last_ratio=0.1, skip=UNTOUCHED, rules="AB"),
        lambda: convnext(depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
        size=32, batch=50, rates={phase: 2e-3 for phase in RATES}, weight_decay=1e-2, images=1000,
    ),
    "short": Preset(
        Config(prune_epochs=12, finetune_epochs=4, final_epochs=10, max_cycles=6, skip=UNTOUCHED, rules="AB"),
        convnext, size=64, batch=512, rates={**RATES, "prune": 3e-4, "finetune": 3e-4, "final": 3e-4},
        weight_decay=1e-2, pad=8,
    ),
    "best": Preset(
        Config(prune_epochs=8, finetune_epochs=10, final_epochs=150, max_cycles=4, grain="channel", multiple=8,
               last_ratio=0.35, score="mean", judged="after training", min_accuracy=0.915, final_gain=0.015),
        convnext, size=64, batch=512, rates={phase: 1e-3 for phase in RATES}, weight_decay=1e-2, pad=8,
        distillation=0.5,
    ),
}  # fmt: skip


def run(preset: str, launch: Launch) -> Result:
    return run_preset(PRESETS[preset], launch)
