"""Whole channels in other loops: what makes one up is known from the first batch on, and after a resumption."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_callbacks_trainer as hf
import torch
from test_callbacks import CONFIG, MasksHold, Module, Parts, Probe, fit, pytestmark
from test_callbacks_resume import checkpoints
from test_cycle import Lines, same_weights

import squeeze_release as sr
from squeeze_release.callbacks import SqueezeReleaseCallback, SqueezeReleaseTrainerCallback
from squeeze_release.callbacks.guest import Guest
from squeeze_release.callbacks.resume import pack, unpack

__all__ = ["pytestmark"]  # the same warnings
CHANNELS = replace(CONFIG, grain="channel", judged="after training", last_ratio=0.3)


def test_the_whole_cycle_in_lightning() -> None:
    lines, probe = Lines(), Probe()
    callback = SqueezeReleaseCallback(CHANNELS, "val_acc", listeners=[lines])
    hold = MasksHold(callback)
    module = fit(callback, probe, hold)
    phases = [line["phase"] for line in lines.of("epoch")]
    assert phases == ["train", *["prune"] * 4, "finetune", *["prune"] * 4, "finetune", "final"]
    assert hold.pruned > 0
    for squeezed in lines.of("squeeze"):  # of what was pruned nothing is left behind
        assert squeezed["params_after"] - squeezed["mask_alive"] < 30 and 0 < squeezed["max_error"] < 1e-10
    summary = callback.summary
    assert summary is not None and summary["accuracy"] > 0.8
    assert summary["deployable_params"] == sum(p.numel() for p in module.parameters()) < 1076 / 4


def test_a_channel_that_is_not_trained_stays() -> None:
    module = Module()
    module.net[0].requires_grad_(False)
    width = module.net[0].out_features
    fit(SqueezeReleaseCallback(replace(CHANNELS, max_cycles=1), "val_acc"), module=module)
    assert module.net[0].out_features == width and sum(p.numel() for p in module.parameters()) < 1076


def test_what_the_optimizer_does_not_have_stays() -> None:
    module = Module()
    others = [p for name, p in module.named_parameters() if not name.startswith("net.0.")]
    guest = Guest(module, torch.optim.SGD(others, 0.1), CHANNELS)
    assert not guest.masks.names
    guest.take_inputs(((torch.randn(4, 12),), {}))
    assert guest.masks.names and "net.0.weight" not in guest.masks.names


def test_a_model_without_any_is_an_error() -> None:
    module = torch.nn.LayerNorm(12)
    guest = Guest(module, torch.optim.SGD(module.parameters(), 0.1), CHANNELS)
    with pytest.raises(sr.InputError, match="there is no weight to prune"):
        guest.take_inputs(((torch.randn(4, 12),), {}))


@pytest.mark.parametrize("given", [False, True])
def test_a_fit_that_is_resumed_ends_as_if_it_had_not_been_stopped(given: bool, tmp_path: Path) -> None:
    def callback() -> SqueezeReleaseCallback:
        return SqueezeReleaseCallback(
            CHANNELS, "val_acc", network="net", example_inputs=torch.randn(4, 12) if given else None
        )

    whole = callback()
    module = fit(whole, checkpoints(tmp_path), module=Parts(), enable_checkpointing=True)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 12
    for file in (files[0], files[3], files[5], files[9]):  # before any pruning, in it, behind a squeeze, in the second
        again = callback()
        assert same_weights(fit(again, module=Parts(), ckpt_path=file), module)
        assert again.points == whole.points


def test_inputs_that_no_checkpoint_can_hold_are_asked_for() -> None:
    def guest() -> Guest:
        module = Module()
        return Guest(module, torch.optim.SGD(module.parameters(), 0.1), CHANNELS)

    first, call = guest(), ((torch.randn(4, 12),), {})
    unpack(guest(), pack(first))  # before the first batch there is nothing to ask for
    first.take_inputs(call)
    assert json.loads(pack(first).about)["example"] is not None
    first.kwargs = {"other": object()}
    resumed = pack(first)
    with pytest.raises(sr.InputError, match="could not hold the example inputs, and without them no channel is known"):
        unpack(guest(), resumed)
    second = guest()
    second.take_inputs(call)
    unpack(second, resumed)
    assert second.masks.state().keys() == first.masks.state().keys()


# --------------------------------------------------------------------------------------------------------- transformers


def test_the_whole_cycle_in_transformers_and_resumed(tmp_path: Path) -> None:
    lines = Lines()
    whole = SqueezeReleaseTrainerCallback(CHANNELS, "accuracy", listeners=[lines])
    watches = hf.Watches(whole)
    arguments: dict[str, Any] = {"save_strategy": "epoch", "seed": 3}
    model = hf.train(whole, tmp_path, watches, **arguments)
    assert watches.pruned > 0 and len(watches.sizes) == 3
    assert whole.summary is not None and whole.summary["deployable_params"] < 1076 / 4
    assert all(0 < line["max_error"] < 1e-10 for line in lines.of("squeeze"))
    checkpoint = tmp_path / "checkpoint-32"  # in the first pruning
    again, narrow = SqueezeReleaseTrainerCallback(CHANNELS, "accuracy"), hf.Model()
    again.resume(narrow, checkpoint)
    hf.train(again, tmp_path / "again", model=narrow, resume=str(checkpoint), **arguments)
    assert same_weights(narrow, model) and again.points == whole.points
