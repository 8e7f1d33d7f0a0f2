"""The cycle inside Lightning's fit: what holds in every epoch, what is refused, and that a resumed fit is the same."""

from __future__ import annotations

import copy
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import tiny
import torch
from lightning.pytorch.callbacks import Callback
from test_cycle import Lines, same_weights
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import squeeze_release as sr
from squeeze_release.callbacks import SqueezeReleaseCallback
from squeeze_release.page import write_page

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),  # Lightning's own
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided.*"),
]
EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = replace(
    tiny.CONFIG, train_epochs=1, prune_epochs=4, finetune_epochs=1, final_epochs=1, max_cycles=2, threshold=0.0,
    max_drop=1.0, last_ratio=0.2, score="mean",
)  # fmt: skip


class Module(lightning.LightningModule):
    def __init__(self, norm: str = "batch", rate: float = 0.01) -> None:
        super().__init__()
        self.net, self.rate = tiny.network(norm), rate

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_acc", tiny.accuracy(self, *batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.95)]


def data(batch: int = 64) -> tuple[DataLoader[Any], DataLoader[Any]]:
    train, validation = (TensorDataset(*tiny.points(count, seed)) for count, seed in ((512, 1), (256, 2)))
    return DataLoader(train, batch), DataLoader(validation, 256)


def trainer(*callbacks: Any, **arguments: Any) -> lightning.Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    arguments = {"max_epochs": 40, "accelerator": "cpu", **quiet, **arguments}
    return lightning.Trainer(callbacks=list(callbacks), **arguments)


def fit(
    callback: SqueezeReleaseCallback, *others: Any, module: Module | None = None, batch: int = 64, **arguments: Any
) -> Module:
    module = module or Module()
    path = arguments.pop("ckpt_path", None)
    trainer(callback, *others, **arguments).fit(module, *data(batch), ckpt_path=path)
    return module


@pytest.mark.parametrize("example", ["lightning_mlp", "trainer_text"])
def test_the_examples_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    before, after = re.search(r"([\d,]+) -> ([\d,]+) parameters", printed).groups()
    assert int(after.replace(",", "")) < int(before.replace(",", "")) / 2
    assert float(re.search(r"largest error of a squeeze (.*)", printed)[1]) < 1e-10


def test_the_package_imports_neither_lightning_nor_transformers() -> None:
    code = (
        "import sys, squeeze_release, squeeze_release.callbacks as c; "
        "assert not {'lightning', 'pytorch_lightning', 'transformers'} & {*sys.modules}; "
        "sys.modules |= dict.fromkeys(['lightning', 'lightning.pytorch', 'pytorch_lightning', 'transformers'])\n"
        "for name in c.__all__:\n"
        "    try: getattr(c, name)\n"
        "    except squeeze_release.InputError as error: assert 'is not installed' in str(error)\n"
        "    else: raise SystemExit(name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --------------------------------------------------------------------------------------------------------- what happens


class Probe(Callback):
    """Looks on, from behind or in front of the callback."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.outputs: list[Tensor] = []
        self.optimizers: set[int] = set()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        assert pl_module.training and all(module.training for module in pl_module.modules())
        with torch.no_grad():
            self.outputs.append(copy.deepcopy(pl_module.net).eval()(tiny.points(64, 5)[0]))
        self.widths.append(sum(p.numel() for p in pl_module.parameters()))
        self._check(trainer.optimizers[0], pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._check(trainer.optimizers[0], pl_module)

    def _check(self, optimizer: torch.optim.Optimizer, pl_module: Any) -> None:
        """The optimizer trains the module's parameters, all of them, and what it keeps has their shapes."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in trained] == [id(p) for p in pl_module.parameters()]
        assert {*map(id, optimizer.state)} <= {*map(id, trained)}
        for parameter, kept in optimizer.state.items():
            assert kept["exp_avg"].shape == parameter.shape and kept["step"] > 0
        self.optimizers.add(id(optimizer))


class MasksHold(Callback):
    """What an update zeroed is zero after every batch, and nothing else is."""

    def __init__(self, callback: SqueezeReleaseCallback) -> None:
        self.callback, self.pruned = callback, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        masks = self.callback._guest.masks
        for name, mask in masks.named().items():
            assert not pl_module.get_parameter(name)[~mask].any()
        self.pruned += masks.total - masks.alive


@pytest.mark.parametrize("judged", ["after training", "at once"])
def test_the_whole_cycle(judged: str, tmp_path: Path) -> None:
    lines, front, behind = Lines(), Probe(), Probe()
    config = replace(CONFIG, judged=judged, release_scale=0.0)  # so that only squeezes change the network
    callback = SqueezeReleaseCallback(config, "val_acc", run_dir=tmp_path / "run", listeners=[lines])
    hold = MasksHold(callback)
    module, runner = Module(), trainer(front, callback, behind, hold)
    runner.fit(module, *data())
    phases = [line["phase"] for line in lines.of("epoch")]
    assert phases == ["train", *["prune"] * 4, "finetune", *["prune"] * 4, "finetune", "final"]
    assert runner.current_epoch == len(phases) == 12  # the fit ends when the cycle does
    first = 1 if judged == "at once" else 0
    alive = [line["alive"] for line in lines.of("epoch", "prune") if line["cycle"] == 1]
    assert alive == [round(960 * sr.prune.cubic((i + first) / 4, last=0.2)) for i in range(4)]
    squeezes = [i for i, (a, b) in enumerate(zip(front.widths, behind.widths, strict=True)) if a > b]
    assert squeezes == [5, 10]
    for i in squeezes:  # other widths, the same function
        torch.testing.assert_close(front.outputs[i], behind.outputs[i], rtol=1e-5, atol=1e-5)
    assert all(0 < line["max_error"] < 1e-10 for line in lines.of("squeeze")) and len(lines.of("squeeze")) == 2
    assert len(front.optimizers | behind.optimizers) == 1
    assert runner.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.95**12)
    assert hold.pruned > 0
    summary = callback.summary
    assert summary is not None and summary["accuracy"] > 0.8 and summary["cycles"] == 2
    sizes = [point.deployable_params for point in callback.points]
    assert sizes[0] == 1076 > sizes[1] > sizes[2] == sum(p.numel() for p in module.parameters())
    assert same_weights(sr.load(Module(), tmp_path / "run" / "final.safetensors"), module)
    names = {"config.json", "metrics.jsonl", "summary.json", "final.safetensors"}
    assert {file.name for file in (tmp_path / "run").iterdir()} == names | {
        f"cycle-00{i}.safetensors" for i in range(3)
    }
    write_page(tmp_path / "page.html", run_dir=tmp_path / "run")
    assert f"{summary['deployable_params']:,}" in (tmp_path / "page.html").read_text()


def test_zeros_are_released_when_a_cycle_is_squeezed() -> None:
    module = fit(SqueezeReleaseCallback(CONFIG, "val_acc"))
    assert all(p.count_nonzero() == p.numel() for p in module.parameters() if p.dim() == 2)


@pytest.mark.parametrize("epochs, phase", [(4, "prune"), (5, "squeeze")])
def test_a_fit_that_ends_in_the_middle_of_a_cycle_leaves_a_dense_network(epochs: int, phase: str) -> None:
    lines = Lines()
    callback = SqueezeReleaseCallback(CONFIG, "val_acc", listeners=[lines])
    front = Probe()
    module = fit(callback, front, max_epochs=epochs)
    (squeezed,) = lines.of("squeeze")
    assert squeezed["phase"] == phase and squeezed["max_error"] < 1e-10
    assert callback.summary is not None and callback.summary["accuracy"] == lines.of("epoch")[-1]["accuracy"]
    accuracy = tiny.accuracy(module.eval(), *tiny.points(256, 2))  # as the loop has seen it: no noise was put in
    assert accuracy == pytest.approx(callback.summary["accuracy"])
    assert sum(p.numel() for p in module.parameters()) == callback.summary["deployable_params"] < 1076


def test_an_update_nobody_has_judged_is_undone() -> None:
    """The loop's steps end within the second epoch of an update."""
    lines = Lines()
    config = replace(CONFIG, epochs_an_update=2, judged="at once")
    callback = SqueezeReleaseCallback(config, "val_acc", listeners=[lines])
    module = fit(callback, max_epochs=-1, max_steps=8 * 4 + 3)  # 1 train, 2 pruned and judged, one and a bit more
    (judged,) = lines.of("epoch", "prune")
    assert callback.summary is not None and callback.summary["mask_alive"] == judged["alive"] < 960
    assert tiny.accuracy(module.eval(), *tiny.points(256, 2)) == pytest.approx(judged["accuracy"])


def test_an_update_that_costs_too_much_is_undone() -> None:
    lines = Lines()
    callback = SqueezeReleaseCallback(replace(CONFIG, threshold=1.01), "val_acc", listeners=[lines])
    fit(callback)
    assert [line["phase"] for line in lines.of("epoch")] == ["train", "prune", "final"]
    assert lines.of("epoch", "prune")[0]["undone"] and not lines.of("squeeze")
    assert callback.summary is not None and callback.summary["deployable_params"] == 1076


def test_the_baseline_squeezes_once_at_the_end() -> None:
    lines = Lines()
    callback = SqueezeReleaseCallback(replace(CONFIG, mode="baseline"), "val_acc", listeners=[lines])
    module = fit(callback)
    assert len(lines.of("squeeze")) == 1 and callback.summary is not None
    assert sum(p.numel() for p in module.parameters()) == callback.summary["deployable_params"] < 1076


def test_accumulated_gradients_are_scored_whole() -> None:
    """Without batch statistics two halves of a batch have the gradient of the whole: the same weights go."""
    networks = []
    for batch, parts in ((64, 1), (32, 2)):
        callback = SqueezeReleaseCallback(replace(CONFIG, max_cycles=1), "val_acc")
        module = Module("layer").double()
        loaders = [
            DataLoader(TensorDataset(x.double(), y), batch) for x, y in (tiny.points(512, 1), tiny.points(256, 2))
        ]
        trainer(callback, accumulate_grad_batches=parts).fit(module, *loaders)
        networks.append(module)
    one, other = (network.state_dict() for network in networks)
    assert one.keys() == other.keys() and sum(p.numel() for p in networks[0].parameters()) < 1076
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-8)


def test_the_last_score_is_that_of_the_last_step() -> None:
    networks = [
        fit(SqueezeReleaseCallback(replace(CONFIG, score=score, max_cycles=1), "val_acc")) for score in ("last", "mean")
    ]
    shapes = [[p.shape for p in network.parameters()] for network in networks]
    assert not same_weights(*networks) and shapes[0] != shapes[1]


def test_frozen_weights_are_left_alone() -> None:
    module = Module()
    module.net[0].requires_grad_(False)
    before = module.net[0].weight.clone()
    callback = SqueezeReleaseCallback(replace(CONFIG, max_cycles=1), "val_acc")
    fit(callback, module=module)
    rows = {tuple(row.tolist()) for row in before}
    assert all(tuple(row.tolist()) in rows for row in module.net[0].weight)


# ------------------------------------------------------------------------------------------------------ example inputs


class Parts(Module):
    """Calls its network, not itself."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


def test_a_part_of_the_module_is_watched_for_its_inputs() -> None:
    config = replace(CONFIG, max_cycles=1)
    with pytest.raises(sr.InputError, match="forward of Parts was not called") as error:
        fit(SqueezeReleaseCallback(config, "val_acc"), module=Parts())
    assert "network='NAME'" in error.value.remedy
    callback = SqueezeReleaseCallback(config, "val_acc", network="net")
    module = fit(callback, module=Parts())
    assert (
        callback.summary is not None
        and callback.summary["deployable_params"] < 1076
        and not module.net._forward_pre_hooks
    )
    with pytest.raises(sr.InputError, match="no part 'nett'"):
        fit(SqueezeReleaseCallback(config, "val_acc", network="nett"))


def test_inputs_that_are_given_count() -> None:
    array = Parts()
    array.example_input_array = torch.randn(4, 12)
    config = replace(CONFIG, max_cycles=1)
    for module, given in ((array, None), (Parts(), {"x": torch.randn(4, 12)}), (Parts(), (torch.randn(4, 12),))):
        callback = SqueezeReleaseCallback(config, "val_acc", example_inputs=given)
        fit(callback, module=module, max_epochs=5)
        assert callback.summary is not None and callback.summary["deployable_params"] < 1076
    with pytest.raises(sr.InputError):  # at once, not at the end of a cycle
        fit(SqueezeReleaseCallback(config, "val_acc", example_inputs=torch.randn(4, 11)), max_epochs=3)
