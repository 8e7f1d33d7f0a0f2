"""transformers: a small random BERT that learns which of two words comes more often, made smaller while it is trained.

python examples/trainer_text.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import squeeze_release as sr
from squeeze_release.callbacks import SqueezeReleaseTrainerCallback

CONFIG = sr.CycleConfig(
    train_epochs=3,  # before any weight goes
    prune_epochs=4,  # a cycle's pruning
    finetune_epochs=1,  # after each squeeze
    max_cycles=1,
    final_epochs=1,
    last_ratio=0.1,
    threshold=0.8,  # an update after which the accuracy is lower is undone
    judged="after training",
    score="mean",
    joint=True,  # rows of queries, keys and values go together
    finish_units=1.0,
)
BERT = BertConfig(
    vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=12, num_labels=2,
)  # fmt: skip


class Words(Dataset[dict[str, torch.Tensor]]):
    """Twelve words of sixteen. The label says whether word 1 comes more often than word 2."""

    def __init__(self, count: int, seed: int) -> None:
        words = torch.randint(1, 16, (count, 12), generator=torch.Generator().manual_seed(seed))
        words = torch.where(words > 8, words % 2 + 1, words)  # half of them are 1 or 2
        self.words, self.labels = words, ((words == 1).sum(1) > (words == 2).sum(1)).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[i], "attention_mask": torch.ones(12).long(), "labels": self.labels[i]}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> dict[str, Any]:
    set_seed(0)
    model = BertForSequenceClassification(BERT)
    callback = SqueezeReleaseTrainerCallback(CONFIG, "accuracy")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder, num_train_epochs=20, per_device_train_batch_size=64, per_device_eval_batch_size=512,
                learning_rate=3e-3, use_cpu=True, save_strategy="no", logging_strategy="no", report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Words(1024, 1),
            eval_dataset=Words(512, 2),
            compute_metrics=accuracy,
            callbacks=[callback],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()

    summary = callback.summary
    assert summary is not None
    for point in callback.points:
        print(f"cycle {point.cycle}: {point.deployable_params:6,} parameters, accuracy {point.accuracy:.3f}")
    print(f"{summary['unpruned_params']:,} -> {summary['deployable_params']:,} parameters")
    print(f"accuracy {summary['accuracy']:.3f}, largest error of a squeeze {summary['max_error']:.0e}")

    sr.save(model, "words.safetensors")  # not save_pretrained: its config says the old widths
    small = sr.load(BertForSequenceClassification(BERT), "words.safetensors")
    words = Words(8, 3).words
    assert torch.equal(small.eval()(words).logits, model.eval()(words).logits)
    return summary


if __name__ == "__main__":
    main()
