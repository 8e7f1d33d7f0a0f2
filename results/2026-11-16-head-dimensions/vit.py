"""A small ViT on 10,000 images of MNIST, four cycles by channels: python vit.py SEED DATA"""

from __future__ import annotations

import sys
from typing import Any

import timm
import torch
from torch.optim import AdamW

from squeeze_release.cycle import Config
from squeeze_release.recipes.data import mnist
from squeeze_release.recipes.launch import Launch
from squeeze_release.recipes.training import Batches, Training, accuracy, normalised


def show(line: dict[str, Any]) -> None:
    if line["event"] == "epoch":
        print(line["phase"], line["cycle"], line["epoch"], round(line["accuracy"], 4), line.get("alive"), flush=True)
    elif line["event"] == "cycle":
        print("CYCLE", line, flush=True)
    elif line["event"] == "squeeze":
        sizes = line["params_before"], line["params_after"], line["mask_alive"]
        print("SQ", *sizes, round(line["seconds"], 1), flush=True)


torch.set_num_threads(2)
seed, split = int(sys.argv[1]), mnist(sys.argv[2])
parts = split.train[:10000], split.validation
train, validation = (normalised(part, [0.13], [0.31], torch.device("cpu")) for part in parts)
launch = Launch(seed, listeners=[show])
torch.manual_seed(seed)
shape = {"img_size": 28, "patch_size": 7, "in_chans": 1, "embed_dim": 64, "depth": 4, "num_heads": 4, "num_classes": 10}
rates = {phase: 1e-3 for phase in ("train", "prune", "finetune", "final")}
result = launch.cycle(
    timm.create_model("vit_small_patch16_224", **shape),
    validation[0][:4],
    Config(
        train_epochs=10, prune_epochs=8, finetune_epochs=6, final_epochs=10, max_cycles=4, grain="channel",
        last_ratio=0.35, threshold=0.6, score="mean", judged="after training",
    ),
    train_epoch=Training(Batches(*train, 128), rates, launch, 0.5),
    optimizer=lambda net, phase: AdamW(net.parameters(), rates[phase], weight_decay=0.05),
    evaluate=lambda net: accuracy(net, *validation),
    test=lambda net: accuracy(net, *validation),
)  # fmt: skip
print("END", result.summary)
for name, parameter in result.model.named_parameters():
    if parameter.dim() > 1:
        print(name, tuple(parameter.shape))
