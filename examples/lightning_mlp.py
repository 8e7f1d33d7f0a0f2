"""Lightning: a small network on the digits of scikit-learn, made smaller while it is trained.

python examples/lightning_mlp.py
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import squeeze_release as sr
from squeeze_release.callbacks import SqueezeReleaseCallback

CONFIG = sr.CycleConfig(
    train_epochs=3,  # before any weight goes
    prune_epochs=6,  # a cycle's pruning
    finetune_epochs=2,  # after each squeeze
    max_cycles=2,
    final_epochs=2,
    last_ratio=0.05,
    threshold=0.85,  # an update after which val_acc is lower is undone
    judged="after training",
    score="mean",
)


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 2e-3)


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, validation = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])
    return DataLoader(train, 64, shuffle=True), DataLoader(validation, 397)


def main() -> dict[str, Any]:
    lightning.seed_everything(0, verbose=False)
    module, callback = Digits(), SqueezeReleaseCallback(CONFIG, "val_acc")
    trainer = lightning.Trainer(
        max_epochs=40,  # at most: the cycle ends before
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, *loaders())

    summary = callback.summary
    assert summary is not None
    for point in callback.points:
        print(f"cycle {point.cycle}: {point.deployable_params:6,} parameters, val_acc {point.accuracy:.3f}")
    print(f"{summary['unpruned_params']:,} -> {summary['deployable_params']:,} parameters")
    print(f"val_acc {summary['accuracy']:.3f}, largest error of a squeeze {summary['max_error']:.0e}")

    sr.save(module, "digits.safetensors")
    small = sr.load(Digits(), "digits.safetensors")
    x, _ = next(iter(loaders()[1]))
    assert torch.equal(small.eval()(x), module.eval()(x))
    return summary


if __name__ == "__main__":
    main()
