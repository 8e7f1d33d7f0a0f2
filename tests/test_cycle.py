"""The loop: its order, its ways to end, its files, and that nothing but the seed decides what comes out."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from torch import nn

import squeeze_release as sr
from squeeze_release.cycle import Result, loop


class Lines(list[dict[str, Any]]):
    """A listener that keeps what it hears."""

    def __call__(self, line: dict[str, Any]) -> None:
        self.append(line)

    def of(self, event: str, phase: str | None = None) -> list[dict[str, Any]]:
        return [line for line in self if line["event"] == event and phase in (None, line["phase"])]


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_whole_cycle() -> None:
    model, lines = tiny.network(), Lines()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = tiny.run(model=model, listeners=[lines])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())  # untouched
    phases = [line["phase"] for line in lines.of("epoch")]
    order = [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase]
    assert order == ["train", *["prune", "finetune"] * 3, "final"]
    sizes = [point.deployable_params for point in result.points]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    for point in result.points[1:]:  # after release, mask-alive is deployable
        assert point.mask_alive == point.deployable_weights < result.points[0].deployable_weights
    summary = result.summary
    assert summary["mask_alive"] == summary["deployable_weights"] == result.points[-1].deployable_weights
    assert summary["deployable_params"] == sum(p.numel() for p in result.model.parameters())
    assert (summary["cycles"], summary["unpruned_weights"], summary["unpruned_params"]) == (3, 960, 1076)
    assert summary["accuracy"] > 0.8
    assert 0 < summary["max_error"] < 1e-10
    assert summary["max_error"] == max(line["max_error"] for line in lines.of("squeeze"))


@pytest.mark.parametrize("judged, first", [("after training", 0), ("at once", 1)])
def test_the_weights_follow_the_schedule(judged: str, first: int) -> None:
    lines = Lines()
    tiny.run(replace(tiny.CONFIG, max_cycles=1, threshold=0.0, max_drop=1.0, judged=judged), listeners=[lines])
    alive = [line["alive"] for line in lines.of("epoch", "prune")]
    assert alive == [round(960 * sr.prune.cubic((i + first) / 6, last=0.02)) for i in range(6)]


def test_an_update_is_judged_at_once_or_after_training() -> None:
    """Training mends much of what an update has broken: judged after it, more updates are stood."""
    config = replace(tiny.CONFIG, max_cycles=1, last_ratio=0.001, threshold=0.8)
    alive = {}
    for judged in ("at once", "after training"):
        lines = Lines()
        tiny.run(replace(config, judged=judged), listeners=[lines])
        (alive[judged],) = (line["mask_alive"] for line in lines.of("squeeze"))
    assert alive["after training"] < alive["at once"] < 960


def test_two_epochs_an_update() -> None:
    lines = Lines()
    config = replace(tiny.CONFIG, max_cycles=1, epochs_an_update=2, schedule="linear", threshold=0.0, max_drop=1.0)
    tiny.run(config, listeners=[lines])
    pruned = lines.of("epoch", "prune")
    assert [line["epoch"] for line in pruned] == [2, 4, 6]
    assert [line["alive"] for line in pruned] == [round(960 * sr.prune.linear(p / 3, last=0.02)) for p in (0, 1, 2)]


def test_an_update_that_costs_too_much_is_undone_and_ends_the_pruning() -> None:
    lines = Lines()
    result = tiny.run(replace(tiny.CONFIG, max_cycles=1, last_ratio=0.001, threshold=0.8), listeners=[lines])
    pruned = lines.of("epoch", "prune")
    assert [line["undone"] for line in pruned] == [False] * (len(pruned) - 1) + [True]
    (squeezed,) = lines.of("squeeze")
    assert squeezed["mask_alive"] == pruned[-2]["alive"] > pruned[-1]["alive"]
    assert len(result.points) == 2


def test_a_drop_from_one_update_to_the_next_is_undone_too() -> None:
    lines = Lines()
    tiny.run(replace(tiny.CONFIG, max_cycles=1, last_ratio=0.001, threshold=0.0, max_drop=0.1), listeners=[lines])
    *good, bad = lines.of("epoch", "prune")
    assert bad["undone"] and bad["accuracy"] < good[-1]["accuracy"] - 0.1


def test_a_cycle_that_fails_at_its_first_update_ends_the_run() -> None:
    lines = Lines()
    result = tiny.run(replace(tiny.CONFIG, threshold=1.01), listeners=[lines])
    assert Counter(line["phase"] for line in lines.of("epoch")) == {"train": 3, "prune": 1, "final": 2}
    assert not lines.of("squeeze")
    assert result.summary["cycles"] == 0
    assert result.summary["deployable_params"] == result.summary["unpruned_params"] == 1076


def test_a_run_ends_when_the_size_no_longer_falls() -> None:
    lines = Lines()
    result = tiny.run(replace(tiny.CONFIG, last_ratio=1.0), listeners=[lines])
    assert len(lines.of("squeeze")) == 1
    assert [line["phase"] for line in lines.of("epoch")][-2:] == ["final", "final"]
    assert result.summary["cycles"] == 0


def test_the_baseline_accumulates_one_mask_and_squeezes_once() -> None:
    lines = Lines()
    result = tiny.run(replace(tiny.CONFIG, mode="baseline"), listeners=[lines])
    assert len(lines.of("squeeze")) == 1
    alive = [point.mask_alive for point in result.points]
    assert alive == sorted(alive, reverse=True)
    assert {point.deployable_weights for point in result.points} == {960}  # the tensors are as large as ever
    assert result.summary["mask_alive"] == alive[-1] < result.summary["deployable_weights"] < 960


@pytest.mark.parametrize("changes", [{"skip": ("3",)}, {"grain": "channel"}], ids=str)
def test_a_baseline_ends_when_its_mask_no_longer_falls(changes: dict[str, Any]) -> None:
    config = replace(tiny.CONFIG, mode="baseline", last_ratio=0.3, threshold=0.0, max_drop=1.0, max_cycles=6, **changes)
    result = tiny.run(config)  # every cycle has the same schedule, so the second prunes nothing more
    assert result.summary["cycles"] == 1 and result.summary["mask_alive"] < 960


def test_a_floor_for_the_accuracy_chooses_the_smallest_network_above_it() -> None:
    free = tiny.run()
    floor = free.points[1].accuracy
    expected = free.smallest(floor)
    assert expected is not None
    result = tiny.run(replace(tiny.CONFIG, min_accuracy=floor))
    assert result.summary["deployable_params"] == expected.deployable_params
    assert (
        tiny.run(replace(tiny.CONFIG, min_accuracy=1.01)).summary["deployable_params"]
        == max(result.points, key=lambda point: point.accuracy).deployable_params
    )


def test_a_floor_may_be_a_distance_from_the_unpruned_network() -> None:
    free, changes = replace(tiny.CONFIG, threshold=0.0, max_drop=1.0), {"final_gain": 0.05, "retries": 1}
    by_loss = tiny.run(replace(free, max_loss=0.02, **changes))
    by_floor = tiny.run(replace(free, min_accuracy=by_loss.points[0].accuracy - 0.02, **changes))
    assert by_loss.points == by_floor.points
    assert _without_seconds(by_loss.summary) == _without_seconds(by_floor.summary)
    assert by_loss.summary["deployable_params"] < by_loss.points[0].deployable_params
    with pytest.raises(sr.InputError, match="two floors"):
        sr.CycleConfig(min_accuracy=0.9, max_loss=0.1)


def _without_seconds(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name != "seconds"}


@pytest.mark.parametrize("grain", ["weight", "channel"])
def test_a_floor_under_the_baseline_keeps_its_zeros(grain: str) -> None:
    config = replace(tiny.CONFIG, mode="baseline", grain=grain, last_ratio=0.2)
    free, floored = tiny.run(config), tiny.run(replace(config, min_accuracy=0.5))
    assert floored.summary["mask_alive"] == min(point.mask_alive for point in floored.points)
    assert floored.summary["deployable_params"] == free.summary["deployable_params"] < 700


def test_cycles_below_the_floor_are_tried_again_half_as_far() -> None:
    free = replace(tiny.CONFIG, grain="channel", threshold=0.0, max_drop=1.0, last_ratio=0.2)
    lines = Lines()
    result = tiny.run(replace(free, min_accuracy=0.93, retries=3, max_cycles=20), listeners=[lines])
    good = [point for point in result.points[1:] if point.accuracy >= 0.93]
    assert len(good) > 2 and len(result.points) - 1 - len(good) == 4  # one more than the retries
    assert result.summary["deployable_params"] == good[-1].deployable_params < 100
    sizes = [point.deployable_params for point in good]
    assert sizes == sorted(sizes, reverse=True)  # each began where the last good one ended
    shares = {line["cycle"]: line["alive"] / line["weights"] for line in lines.of("epoch", "prune")}
    failed = 0
    for point in result.points[1:]:
        wanted = sr.prune.cubic(5 / 6, last=0.2**0.5**failed)
        assert wanted - 0.2 < shares[point.cycle] <= wanted  # channels are large here
        failed += point not in good


def test_the_last_fine_tuning_takes_a_larger_network_where_it_must() -> None:
    lines = Lines()
    free = replace(tiny.CONFIG, grain="channel", threshold=0.0, max_drop=1.0, last_ratio=0.3, max_cycles=4)
    config = replace(free, min_accuracy=0.955, final_gain=0.5)
    result = tiny.run(config, listeners=[lines])
    tried = [line["weights"] for line in lines.of("epoch", "final")][:: config.final_epochs]
    assert len(tried) > 1 and tried == sorted(tried)  # the smallest first
    ends = [line["accuracy"] for line in lines.of("epoch", "final")][config.final_epochs - 1 :: config.final_epochs]
    assert all(end < 0.955 for end in ends[:-1]) and ends[-1] >= 0.955
    assert result.summary["validation_accuracy"] == ends[-1]
    never = tiny.run(replace(free, min_accuracy=1.1, final_gain=2.0))  # out of reach: the largest of all is left
    assert never.summary["deployable_params"] == never.points[0].deployable_params


def test_a_run_that_never_fails_its_floor_ends_as_ever() -> None:
    assert tiny.run(replace(tiny.CONFIG, min_accuracy=0.1, retries=2)).summary["cycles"] == 3
    with pytest.raises(sr.InputError, match="retries=2 without a floor"):
        sr.CycleConfig(retries=2)


def test_every_network_of_the_curve_can_be_had(tmp_path: Path) -> None:
    result = tiny.run(run_dir=tmp_path / "run")
    x, y = tiny.Training().validation
    for point in result.points:
        network = result.network(point.cycle).eval()
        assert sum(p.numel() for p in network.parameters()) == point.deployable_params
        assert tiny.accuracy(network, x, y) == pytest.approx(point.accuracy)


def test_the_seed_decides_and_nothing_else() -> None:
    first = tiny.run()
    torch.rand(7)
    again, other = tiny.run(), tiny.run(replace(tiny.CONFIG, seed=1))
    assert same_weights(first.model, again.model)
    assert not same_weights(first.model, other.model)


def test_the_files_of_a_run(tmp_path: Path) -> None:
    folder, lines = tmp_path / "run", Lines()
    result = tiny.run(run_dir=folder, listeners=[lines])
    assert json.loads((folder / "summary.json").read_text()) == result.summary
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == lines
    assert json.loads((folder / "config.json").read_text())["prune_epochs"] == 6
    assert same_weights(sr.load(tiny.network(), folder / "final.safetensors"), result.model)
    names = {"config.json", "metrics.jsonl", "state.safetensors", "summary.json", "final.safetensors"}
    assert {file.name for file in folder.iterdir()} == names | {f"cycle-00{i}.safetensors" for i in range(4)}


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first, lines = tiny.run(run_dir=tmp_path / "run"), Lines()
    again = tiny.run(run_dir=tmp_path / "run", resume=True, listeners=[lines])
    assert not lines and again.summary == first.summary and same_weights(again.model, first.model)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    tiny.run(run_dir=tmp_path / "run", config=replace(tiny.CONFIG, max_cycles=1))
    with pytest.raises(sr.InputError, match="holds a run already"):
        tiny.run(run_dir=tmp_path / "run")
    with pytest.raises(sr.InputError, match="another configuration: max_cycles 1 there, 3 here"):
        tiny.run(run_dir=tmp_path / "run", resume=True)


BREAKABLE: dict[str, dict[str, Any]] = {
    "cycle": {},
    "baseline": {"mode": "baseline"},
    "at once": {"judged": "at once", "threshold": 0.6},
    "channels": {"grain": "channel", "last_ratio": 0.5},
    "retries": {
        "threshold": 0.0, "max_drop": 1.0, "min_accuracy": 0.97, "retries": 2, "max_cycles": 5, "final_gain": 0.2,
    },
}  # fmt: skip


class Unbroken(NamedTuple):
    config: sr.CycleConfig
    result: Result
    metrics: list[dict[str, Any]]


@pytest.fixture(scope="module", params=BREAKABLE)
def unbroken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    config, folder = replace(tiny.CONFIG, **BREAKABLE[request.param]), tmp_path_factory.mktemp("runs") / "whole"
    torch.manual_seed(0)
    return Unbroken(config, tiny.run(config, run_dir=folder), timeless(folder))


def timeless(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.mark.parametrize("part", range(8))
def test_a_run_that_breaks_goes_on_as_if_it_had_not(tmp_path: Path, part: int, unbroken: Unbroken) -> None:
    config, whole, metrics = unbroken
    moment = sum(line["event"] == "epoch" for line in metrics) * part // 8

    class Breaks(tiny.Training):
        epochs = 0

        def epoch(self, *arguments: Any) -> None:
            if self.epochs == moment:
                raise KeyboardInterrupt
            self.epochs += 1
            super().epoch(*arguments)

    with pytest.raises(KeyboardInterrupt):
        tiny.run(config, training=Breaks(), run_dir=tmp_path / "broken", checkpoint_seconds=0)
    resumed = tiny.run(config, run_dir=tmp_path / "broken", resume=True)
    assert resumed.summary | {"seconds": 0} == whole.summary | {"seconds": 0}
    assert same_weights(resumed.model, whole.model)
    assert timeless(tmp_path / "broken") == metrics


def test_a_run_stops_after_its_time_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stops = tiny.run(), 0
    a_second_a_look = SimpleNamespace(monotonic=itertools.count().__next__)  # however fast the machine is
    monkeypatch.setattr(loop, "time", a_second_a_look)
    while True:
        try:
            result = tiny.run(run_dir=tmp_path / f"run{stops}", resume=True, stop_after=4)
            break
        except sr.RunStopped as stopped:
            assert "resume=True" in stopped.remedy
            (tmp_path / f"run{stops}").rename(tmp_path / f"run{stops + 1}")  # the folder may be moved
            stops += 1
    assert stops > 3 and same_weights(result.model, whole.model)
    with pytest.raises(sr.InputError, match="needs a folder"):
        tiny.run(stop_after=1.0)


def test_scores_over_the_epoch_and_toward_dead_units() -> None:
    config = replace(tiny.CONFIG, max_cycles=1, last_ratio=0.1, threshold=0.0, max_drop=1.0)
    plain = tiny.run(config)
    mean = tiny.run(replace(config, score="mean"))
    units = tiny.run(replace(config, score="mean", finish_units=2.0))
    assert not same_weights(plain.model, mean.model)
    assert units.summary["deployable_weights"] < mean.summary["deployable_weights"]  # what it is for


def test_gradients_that_are_gone_are_an_error_that_says_so() -> None:
    class Tidy(tiny.Training):
        def epoch(self, model: nn.Module, optimizer: Any, epoch: sr.Epoch) -> None:
            super().epoch(model, optimizer, epoch)
            optimizer.zero_grad()

    with pytest.raises(sr.InputError, match="no parameter has a gradient"):
        tiny.run(training=Tidy())
    assert tiny.run(replace(tiny.CONFIG, score="mean"), training=Tidy()).summary["cycles"] == 3


def test_a_model_without_weights_to_prune_is_refused() -> None:
    with pytest.raises(sr.InputError, match="there is no weight to prune"):
        tiny.run(replace(tiny.CONFIG, skip=("0", "3", "5")))


@pytest.mark.parametrize("grain", ["weight", "channel"])
def test_frozen_layers_keep_what_they_have(grain: str) -> None:
    model = tiny.network()
    model[3].requires_grad_(False)  # 32 -> 16
    result = tiny.run(replace(tiny.CONFIG, grain=grain, last_ratio=0.3, threshold=0.0, max_drop=1.0), model=model)
    before, after = model[3].weight, result.model[3].weight
    if grain == "channel":
        assert torch.equal(after, before)
    else:  # its inputs may die, and what reads it may stop to
        rows = [i for i in range(16) if any(set(row.tolist()) <= set(before[i].tolist()) for row in after)]
        assert len(rows) == len(after)
    assert result.summary["deployable_params"] < 900


def test_a_network_of_which_nothing_is_left_ends_the_run() -> None:
    result = tiny.run(replace(tiny.CONFIG, last_ratio=0.0, threshold=0.0, max_drop=1.0))
    assert result.summary["deployable_weights"] == 0 < result.summary["deployable_params"]
    assert result.model(torch.randn(3, 12)).shape == (3, 4)


def test_a_teacher_is_the_unpruned_network() -> None:
    seen = []

    class Distils(tiny.Training):
        def epoch(self, model: nn.Module, optimizer: Any, epoch: sr.Epoch) -> None:
            if epoch.phase != "train":
                seen.append(epoch.unpruned())
            super().epoch(model, optimizer, epoch)

    result = tiny.run(replace(tiny.CONFIG, max_cycles=1), training=Distils())
    assert all(same_weights(teacher, result.network(0)) for teacher in seen) and seen


@pytest.mark.parametrize("field", ["mode", "schedule", "score", "judged", "grain"])
def test_a_config_that_makes_no_sense_is_refused(field: str) -> None:
    with pytest.raises(sr.InputError, match=f"{field}='nonsense' is not a known value"):
        sr.CycleConfig(**{field: "nonsense"})
