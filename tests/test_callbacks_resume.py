"""Lightning: checkpoints with narrow weights, what is refused, and the optimizer that follows the network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from nets import dead, unread
from test_callbacks import CONFIG, Module, data, fit, pytestmark, trainer
from test_cycle import Lines, same_weights
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release.callbacks import SqueezeReleaseCallback
from squeeze_release.callbacks.guest import Guest
from squeeze_release.callbacks.optimizer import rebind
from squeeze_release.callbacks.resume import pack

__all__ = ["pytestmark"]  # the same warnings


# ---------------------------------------------------------------------------------------------------------- checkpoints


def checkpoints(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch:02}", save_top_k=-1)


@pytest.mark.parametrize("changes", [{"judged": "at once"}, {"epochs_an_update": 2}, {"mode": "baseline"}], ids=str)
def test_a_fit_that_is_resumed_ends_as_if_it_had_not_been_stopped(changes: dict[str, Any], tmp_path: Path) -> None:
    config, lines = replace(CONFIG, **changes), Lines()
    whole = SqueezeReleaseCallback(config, "val_acc", run_dir=tmp_path / "whole", listeners=[lines])
    module = fit(whole, checkpoints(tmp_path / "files"), enable_checkpointing=True)
    files = sorted((tmp_path / "files").iterdir())
    assert len(files) == (11 if config.mode == "baseline" else 12)  # whose second cycle has nothing to add
    for file in (files[3], files[9]):  # in the first pruning; before the second squeeze, or the baseline's final epoch
        again = SqueezeReleaseCallback(config, "val_acc", run_dir=tmp_path / file.stem)
        resumed = fit(again, ckpt_path=file)
        assert same_weights(resumed, module)
        assert again.points == whole.points and again.summary is not None and whole.summary is not None
        assert again.summary | {"seconds": 0} == whole.summary | {"seconds": 0}
    assert len({sum(w.numel() for w in torch.load(f)["state_dict"].values()) for f in files}) >= (
        1 if "mode" in changes else 3
    )


@pytest.mark.filterwarnings("ignore:.*checkpoint that ended before the epoch ended.*")  # Lightning begins it again
@pytest.mark.parametrize("step", [28, 32])  # in an epoch, and after its last batch, before it is judged
def test_from_the_middle_of_an_epoch_the_update_goes_on(step: int, tmp_path: Path) -> None:
    within = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=4)
    fit(SqueezeReleaseCallback(CONFIG, "val_acc"), within, enable_checkpointing=True, max_epochs=5)
    lines = Lines()
    callback = SqueezeReleaseCallback(CONFIG, "val_acc", listeners=[lines])
    fit(callback, ckpt_path=tmp_path / f"step={step}.ckpt")
    assert lines[0]["epoch"] == 3 and lines[0]["alive"] == round(960 * sr.prune.cubic(2 / 4, last=0.2))
    assert [line["phase"] for line in lines.of("epoch")].count("prune") == 2 + 4
    assert callback.summary is not None and callback.summary["cycles"] == 2


def test_inputs_that_no_checkpoint_can_hold_are_asked_for() -> None:
    module = Module()
    guest = Guest(module, torch.optim.SGD(module.parameters(), 0.1), CONFIG)
    guest.state = replace(guest.state, phase="squeeze")
    guest.example_inputs, guest.kwargs = (torch.ones(2), object()), {}
    assert json.loads(pack(guest).about)["example"] is None
    guest.example_inputs = None
    with pytest.raises(sr.InputError, match="could not hold the example inputs"):
        guest.epoch_begins()


def test_the_metrics_of_a_resumed_fit_go_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    def callback() -> SqueezeReleaseCallback:
        return SqueezeReleaseCallback(CONFIG, "val_acc", run_dir=tmp_path / "run")

    fit(callback(), checkpoints(tmp_path / "files"), enable_checkpointing=True, max_epochs=8)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert metrics.read_text().count('"event": "epoch"') == 8
    fit(callback(), ckpt_path=tmp_path / "files" / "epoch=05.ckpt")
    assert metrics.read_text().count('"event": "epoch"') == 12
    with pytest.raises(sr.InputError, match="holds a run already"):
        fit(callback())


def test_a_checkpoint_is_tested_in_a_new_module(tmp_path: Path) -> None:
    callback = SqueezeReleaseCallback(CONFIG, "val_acc")
    fit(callback, checkpoints(tmp_path), enable_checkpointing=True)
    runner = trainer(SqueezeReleaseCallback(CONFIG, "val_acc"))
    (result,) = runner.validate(Module(), data()[1], ckpt_path=str(tmp_path / "epoch=11.ckpt"), verbose=False)
    assert callback.summary is not None and result["val_acc"] == pytest.approx(callback.summary["accuracy"])


def test_a_cycle_that_was_over_is_not_begun_again(tmp_path: Path) -> None:
    callback = SqueezeReleaseCallback(CONFIG, "val_acc")
    module = fit(callback, checkpoints(tmp_path), enable_checkpointing=True)
    again = SqueezeReleaseCallback(CONFIG, "val_acc")
    resumed = fit(again, ckpt_path=tmp_path / "epoch=11.ckpt")
    assert again.points == callback.points and again.summary is not None
    assert [p.shape for p in resumed.parameters()] == [p.shape for p in module.parameters()]


class Loads(Module):
    """Has something to say about checkpoints itself."""

    loaded = 0

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded += 1


def test_nothing_is_left_on_the_module(tmp_path: Path) -> None:
    first, module = SqueezeReleaseCallback(CONFIG, "val_acc"), Loads()
    fit(first, checkpoints(tmp_path), module=Loads(), enable_checkpointing=True, max_epochs=7)
    fit(SqueezeReleaseCallback(CONFIG, "val_acc"), module=module, ckpt_path=tmp_path / "epoch=06.ckpt", max_epochs=8)
    assert module.loaded == 1 and "on_load_checkpoint" not in vars(module)
    broken = Module()
    with pytest.raises(sr.InputError):
        fit(SqueezeReleaseCallback(CONFIG, "val_acc"), module=broken, limit_val_batches=0)
    for each in (module, broken):
        assert "on_load_checkpoint" not in vars(each) and not each._forward_pre_hooks


def test_what_cannot_be_resumed_says_so(tmp_path: Path) -> None:
    fit(SqueezeReleaseCallback(CONFIG, "val_acc"), checkpoints(tmp_path), enable_checkpointing=True, max_epochs=7)
    file = tmp_path / "epoch=06.ckpt"
    with pytest.raises(sr.InputError, match="another configuration: seed 0 there, 1 here"):
        fit(SqueezeReleaseCallback(replace(CONFIG, seed=1), "val_acc"), ckpt_path=file)
    with pytest.raises(sr.StoreError, match="in this model"):
        fit(SqueezeReleaseCallback(CONFIG, "val_acc"), module=Module("layer"), ckpt_path=file)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"train_epochs": 0}, "train_epochs=0: nobody would evaluate"),
        ({"finetune_epochs": 0}, "finetune_epochs=0: nobody would evaluate"),
        ({"min_accuracy": 0.9}, "min_accuracy=0.9: the network of an earlier cycle"),
        ({"max_loss": 0.1}, "max_loss=0.1: the network of an earlier cycle"),
    ],
)
def test_a_config_that_makes_no_sense_in_another_loop(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(sr.InputError, match=said):
        SqueezeReleaseCallback(replace(CONFIG, **changes), "val_acc")


class Odd(Module):
    """Logs what no decision can be made by."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.log("train_acc", 0.9)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        super().validation_step(batch, index)
        self.log("nothing", float("nan"))


@pytest.mark.parametrize(
    "metric, said",
    [
        ("val_accuracy", "validation logs no 'val_accuracy', but .*val_acc"),
        ("train_acc", "validation logs no 'train_acc'"),  # it says nothing of a network pruned since
        ("nothing", "'nothing' is NaN"),
        ("val_loss", "'val_loss' looks like a loss"),
    ],
)
def test_metrics_that_cannot_decide(metric: str, said: str) -> None:
    with pytest.raises(sr.InputError, match=said):
        fit(SqueezeReleaseCallback(CONFIG, metric), module=Odd())


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"limit_val_batches": 0}, "there is no validation data"),
        ({"check_val_every_n_epoch": 2}, "check_val_every_n_epoch=2"),
        ({"val_check_interval": 3}, "was not evaluated at its end"),
        ({"max_epochs": 1}, "the loop ends after 1 epochs, and pruning begins after 1"),
    ],
)
def test_loops_that_do_not_evaluate(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(sr.InputError, match=said):
        fit(SqueezeReleaseCallback(CONFIG, "val_acc"), **arguments)


def test_several_validations_an_epoch_are_fine_if_one_is_at_its_end() -> None:
    callback = SqueezeReleaseCallback(replace(CONFIG, max_cycles=1, judged="at once"), "val_acc")
    fit(callback, val_check_interval=0.5, limit_train_batches=4, precision="bf16-mixed")
    assert callback.summary is not None and callback.summary["deployable_params"] < 1076


def test_wrapped_models_and_several_devices_are_refused() -> None:
    callback, module = SqueezeReleaseCallback(CONFIG, "val_acc"), Module()
    with pytest.raises(sr.InputError, match="2 processes and DDPStrategy") as error:
        callback.setup(trainer(strategy="ddp", devices=2), module, "fit")
    assert "sr.cycle" in error.value.remedy and "accelerate" in error.value.remedy
    with pytest.raises(sr.InputError, match="StochasticWeightAveraging keeps a copy"):
        fit(callback, StochasticWeightAveraging(1e-2))
    with pytest.raises(sr.ModelError, match="its forward was replaced"):
        trainer(callback).fit(torch.compile(Module()), *data())
    inside = Module()
    inside.net = torch.compile(inside.net)
    with pytest.raises(sr.ModelError, match="OptimizedModule wraps a part of the model"):
        fit(callback, module=inside)


def test_two_optimizers_and_nothing_to_prune_are_refused() -> None:
    class Two(Module):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.net[0], self.net[3])]

    with pytest.raises(sr.InputError, match="there are 2 optimizers"):
        fit(SqueezeReleaseCallback(CONFIG, "val_acc"), module=Two())
    with pytest.raises(sr.InputError, match="there is no weight to prune"):
        fit(SqueezeReleaseCallback(replace(CONFIG, skip=("net",)), "val_acc"))


def test_a_model_that_cannot_be_exported_is_an_error_in_the_first_batch() -> None:
    class Branches(Module):
        batches = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * (2 if self.net(x)[0, 0].item() > 0 else 1)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            self.batches += 1
            return super().training_step(batch, index)

    module = Branches()
    with pytest.raises(sr.SqueezeError):
        fit(SqueezeReleaseCallback(CONFIG, "val_acc"), module=module)
    assert module.batches == 1


def test_the_other_package() -> None:
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    made = type("Other", (pytorch_lightning.LightningModule,), {k: v for k, v in vars(Module).items() if k[:2] != "__"})
    module = made()
    module.net, module.rate = tiny.network(), 0.01
    callback = SqueezeReleaseCallback(replace(CONFIG, max_cycles=1), "val_acc")
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    runner = pytorch_lightning.Trainer(callbacks=[callback], max_epochs=9, accelerator="cpu", **quiet)
    runner.fit(module, *data())
    assert callback.summary is not None and callback.summary["deployable_params"] < 1076


# -------------------------------------------------------------------------------------------------------- the optimizer


def stepped(net: nn.Module, x: Tensor, groups: Any = None, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer = kind(groups or net.parameters(), 0.01)
    net(x).square().sum().backward()
    optimizer.step()
    return optimizer


def squeezed_with(net: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> sr.Report:
    before = dict(net.named_parameters(remove_duplicate=False))
    report = sr.squeeze(net, x, inplace=True).report
    rebind(optimizer, before, net, report)
    return report


def test_momenta_are_cut_like_their_parameters() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 4)
    optimizer = stepped(net, x)
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in net.named_parameters()}
    dead(net[0], 1, 5)
    squeezed_with(net, x, optimizer)
    rows = [0, 2, 3, 4, 6, 7]
    expected = {"0.weight": moments["0.weight"][rows], "0.bias": moments["0.bias"][rows]}
    expected |= {"2.weight": moments["2.weight"][:, rows], "2.bias": moments["2.bias"]}
    assert len(optimizer.state) == 4
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], expected[name], rtol=0, atol=0)


def test_momenta_of_grouped_convolutions() -> None:
    net, x = (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 2, 1)),
        torch.randn(2, 3, 6, 6),
    )
    optimizer = stepped(net, x)
    with torch.no_grad():  # each group loses another column
        net[1].weight[:4, 1] = 0
        net[1].weight[4:, 2] = 0
        for p in net.parameters():
            optimizer.state[p]["exp_avg"].copy_(p)  # so that one shows what the other is
    report = squeezed_with(net, x, optimizer)
    assert report.group_columns and net[1].weight.shape == (8, 3, 3, 3)
    for name in ("0.weight", "1.weight", "2.weight"):
        parameter = net.get_parameter(name)
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], parameter.detach(), rtol=0, atol=0)


def test_a_new_bias_joins_the_biases_where_a_fresh_optimizer_would_have_it() -> None:
    net, x = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)),
        torch.randn(5, 4),
    )

    def groups() -> list[dict[str, Any]]:
        named = list(net.named_parameters())
        return [
            {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
        ]

    optimizer = stepped(net, x, groups())
    dead(net[0], 1, 5)
    with torch.no_grad():
        net[0].bias.fill_(0.5)  # so that the dead units are constants, which the next layer takes up
    squeezed_with(net, x, optimizer)
    assert net[2].bias is not None
    have = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert have == [[id(p) for p in group["params"]] for group in groups()]
    assert net[2].bias not in optimizer.state
    net(x).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_what_cannot_be_cut_starts_afresh() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 4)
    other = nn.Parameter(torch.ones(2))
    optimizer = stepped(net, x, [*net.parameters(), other], torch.optim.Adafactor)
    assert net[0].weight in optimizer.state
    unread(net[2], 1)
    squeezed_with(net, x, optimizer)
    assert net[0].weight not in optimizer.state and net[2].bias in optimizer.state  # the one is new, the other was kept
    assert optimizer.param_groups[0]["params"][-1] is other  # which the optimizer trains beside the network
    net(x).sum().backward()
    optimizer.step()
