"""The cycle inside the Trainer of transformers: the same promises as in Lightning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from test_cycle import Lines, same_weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import squeeze_release as sr
from squeeze_release.callbacks import SqueezeReleaseTrainerCallback

CONFIG = replace(
    tiny.CONFIG, train_epochs=1, prune_epochs=4, finetune_epochs=1, final_epochs=1, max_cycles=2, threshold=0.0,
    max_drop=1.0, last_ratio=0.2, score="mean",
)  # fmt: skip


class Points(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        self.x, self.y = tiny.points(count, seed)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.y[i]}


class Model(nn.Module):
    """Speaks the Trainer's language: a loss, if there are labels."""

    def __init__(self, norm: str = "batch") -> None:
        super().__init__()
        self.net = tiny.network(norm)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(
    callback: Any, folder: Path, *others: Any, model: nn.Module | None = None, resume: Any = None, **arguments: Any
) -> nn.Module:
    model = model or Model()
    evaluated = arguments.pop("eval_dataset", Points(256, 2))
    given = {"num_train_epochs": 40, "per_device_train_batch_size": 64, "per_device_eval_batch_size": 256}
    given |= {"learning_rate": 0.01, "use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    settings = TrainingArguments(folder, **(given | {"logging_strategy": "no"} | arguments))
    trainer = Trainer(
        model, settings, train_dataset=Points(512, 1), eval_dataset=evaluated, compute_metrics=accuracy,
        callbacks=[callback, *others],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return model


class Watches(TrainerCallback):
    """The masks hold after every step, and the optimizer trains what there is."""

    def __init__(self, callback: SqueezeReleaseTrainerCallback) -> None:
        self.callback, self.pruned, self.sizes = callback, 0, set()

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        masks = self.callback._guest.masks
        for name, mask in masks.named().items():
            assert not model.get_parameter(name)[~mask].any()
        self.pruned += masks.total - masks.alive
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        assert {*map(id, trained)} == {*map(id, model.parameters())} and len(optimizer.state) == len(trained)
        assert all(kept["exp_avg"].shape == p.shape for p, kept in optimizer.state.items())
        self.sizes.add(sum(p.numel() for p in trained))


@pytest.mark.parametrize("changes", [{"judged": "at once"}, {"judged": "after training"}], ids=str)
def test_the_whole_cycle(changes: dict[str, Any], tmp_path: Path) -> None:
    lines = Lines()
    config = replace(CONFIG, **changes)
    callback = SqueezeReleaseTrainerCallback(config, "accuracy", run_dir=tmp_path / "run", listeners=[lines])
    watches = Watches(callback)
    model = train(callback, tmp_path, watches)
    phases = [line["phase"] for line in lines.of("epoch")]
    assert phases == ["train", *["prune"] * 4, "finetune", *["prune"] * 4, "finetune", "final"]
    assert all(0 < line["max_error"] < 1e-10 for line in lines.of("squeeze")) and len(lines.of("squeeze")) == 2
    assert watches.pruned > 0 and len(watches.sizes) == 3
    summary = callback.summary
    assert summary is not None and summary["accuracy"] > 0.8
    assert summary["deployable_params"] == sum(p.numel() for p in model.parameters()) == min(watches.sizes) < 1076
    assert same_weights(sr.load(Model(), tmp_path / "run" / "final.safetensors"), model)


def test_mixed_precision_squeezes_the_model_as_its_code_has_it(tmp_path: Path) -> None:
    """accelerate puts another forward on the object, under which outputs have eight bits."""
    lines = Lines()
    callback = SqueezeReleaseTrainerCallback(replace(CONFIG, max_cycles=1), "accuracy", listeners=[lines])
    watches = Watches(callback)
    model = train(callback, tmp_path, watches, bf16=True)
    assert len(watches.sizes) == 2 and callback.summary is not None and callback.summary["accuracy"] > 0.8
    (squeezed,) = lines.of("squeeze")
    assert 0 < squeezed["max_error"] < 1e-10 and squeezed["max_difference"] < 1e-5 and "forward" in vars(model)
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_gradients_that_are_accumulated_are_scored_whole(tmp_path: Path) -> None:
    networks = []
    for batch, parts in ((64, 1), (32, 2)):
        callback = SqueezeReleaseTrainerCallback(replace(CONFIG, max_cycles=1), "accuracy")
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": parts}
        networks.append(train(callback, tmp_path, model=Model("layer"), **sizes))
    one, other = (network.state_dict() for network in networks)
    assert sum(p.numel() for p in networks[0].parameters()) < 1076
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- checkpoints


# In a pruning epoch, before the squeeze; in the second pruning.
@pytest.mark.parametrize("judged, steps", [("after training", (20, 40)), ("at once", (76,))])
def test_training_that_is_resumed_ends_as_if_it_had_not_been_stopped(
    judged: str, steps: tuple[int, ...], tmp_path: Path
) -> None:
    config = replace(CONFIG, judged=judged)
    whole = SqueezeReleaseTrainerCallback(config, "accuracy")
    model = train(whole, tmp_path / "whole", save_strategy="steps", save_steps=4)  # twice an epoch: in its middle too
    for step in steps:
        again, callback = Model(), SqueezeReleaseTrainerCallback(config, "accuracy")
        callback.resume(again, tmp_path / "whole" / f"checkpoint-{step}")
        train(callback, tmp_path / "again", model=again, resume=tmp_path / "whole" / f"checkpoint-{step}")
        assert same_weights(again, model) and callback.points == whole.points


def test_what_cannot_be_resumed_says_so(tmp_path: Path) -> None:
    train(SqueezeReleaseTrainerCallback(CONFIG, "accuracy"), tmp_path, save_strategy="epoch", num_train_epochs=7)
    early, late = tmp_path / "checkpoint-16", tmp_path / "checkpoint-56"
    callback = SqueezeReleaseTrainerCallback(CONFIG, "accuracy")
    with pytest.raises(sr.InputError, match="training goes on from step 16, pruning from step 0") as error:
        train(callback, tmp_path, resume=early)
    assert "callback.resume" in error.value.remedy
    model = Model()
    callback.resume(model, late)
    assert sum(p.numel() for p in model.parameters()) < 1076
    with pytest.raises(sr.InputError, match="cannot be read"):
        callback.resume(Model(), tmp_path / "nowhere")
    with pytest.raises(sr.InputError, match="another configuration: seed 0 there, 1 here"):
        SqueezeReleaseTrainerCallback(replace(CONFIG, seed=1), "accuracy").resume(Model(), late)
    other = Model("layer")
    with pytest.raises(sr.StoreError, match="in this model"):
        callback.resume(other, late)
    assert same_weights(other, Model("layer"))


# ------------------------------------------------------------------------------------------------------ what is refused


def test_metrics_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(sr.InputError, match=r"gives no 'eval_f1', but .*eval_accuracy"):
        train(SqueezeReleaseTrainerCallback(CONFIG, "f1"), tmp_path)
    with pytest.raises(sr.InputError, match="looks like a loss"):
        SqueezeReleaseTrainerCallback(CONFIG, "eval_loss")


def test_one_of_several_sets_of_data_decides(tmp_path: Path) -> None:
    lines, sets = Lines(), {"a": Points(64, 2), "b": Points(256, 2)}
    callback = SqueezeReleaseTrainerCallback(replace(CONFIG, max_cycles=1), "b_accuracy", listeners=[lines])
    train(callback, tmp_path, eval_dataset=sets, num_train_epochs=3)
    assert all((line["accuracy"] * 256).is_integer() for line in lines.of("epoch")) and len(lines.of("epoch")) == 3


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch"}, "other widths"),
        ({"torch_compile": True}, "torch_compile=True"),
        ({"num_train_epochs": 1}, "the loop ends after 1 epochs"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(sr.InputError, match=said):
        train(SqueezeReleaseTrainerCallback(CONFIG, "accuracy"), tmp_path, **arguments)


def test_training_without_evaluation_data_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eval_dataset"):  # the Trainer's own
        train(SqueezeReleaseTrainerCallback(CONFIG, "accuracy"), tmp_path, eval_dataset=None)


def test_several_devices_are_refused() -> None:
    callback = SqueezeReleaseTrainerCallback(CONFIG, "accuracy")
    arguments = SimpleNamespace(parallel_mode=SimpleNamespace(value="distributed"))
    with pytest.raises(sr.InputError, match="parallel mode 'distributed'"):
        callback.on_train_begin(arguments, None, None, model=Model())
