"""The zoo run: the planter counts right, and no model, however it fails, ends the run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import noise  # noqa: E402
import observe  # noqa: E402
import planter  # noqa: E402
import streams  # noqa: E402


def _load(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, BENCHMARKS / file
    )  # `coverage` is also a package on many machines
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


coverage = _load("squeeze_coverage", "coverage.py")
coverage_page = _load("squeeze_coverage_page", "coverage_page.py")

ZOO = """
import os, time, sys
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import torch
from torch import nn
from zoo import Entry

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        return x + self.fc2(self.fc1(self.norm(x)).relu())

def mlp():
    return nn.Sequential(nn.Linear(8, 32), *[Block() for _ in range(3)], nn.Linear(32, 5))

def conv():
    stem = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*stem, nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(512, 5))

def broken(): raise ValueError("no such model")
def crash(): os.abort()
def slow(): time.sleep(1000)
def large():
    numbers = torch.ones(50_000_000, dtype=torch.float64)
    time.sleep(1000)

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else self.fc(-x)

def vectors(batch, generator):
    return (torch.randn(batch, 8, generator=generator, dtype=torch.float64),), {{}}
def images(batch, generator):
    return (torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64),), {{}}

ENTRIES = [
    Entry("tiny_mlp", "tiny_mlp", "tests", mlp, vectors), Entry("tiny_conv", "tiny_conv", "tests", conv, images),
    Entry("broken", "broken", "tests", broken, vectors), Entry("crash", "crash", "tests", crash, vectors),
    Entry("slow", "slow", "limits", slow, vectors), Entry("large", "large", "limits", large, vectors),
    Entry("branches", "branches", "tests", Branches, vectors),
]
"""


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    file = tmp_path / "own_zoo.py"
    file.write_text(ZOO.format(benchmarks=str(BENCHMARKS)))
    return file


def _run(zoo: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "coverage.py"), "--zoo", str(zoo), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _images(batch: int) -> observe.Call:
    return (torch.randn(batch, 3, 8, 8, dtype=torch.float64),), {}


# -------------------------------------------------------------------------------------------------------------- observe


class Residual(nn.Module):
    """A stream of 8 channels with two writers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc1, self.fc2, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.fc2(self.fc1(x).tanh())
        out: Tensor = self.head(x)
        return out


@torch.no_grad()
def test_a_stream_channel_is_dead_only_if_all_writers_leave_it_alone() -> None:
    net, call = Residual().double(), ((torch.randn(3, 4, dtype=torch.float64),), {})
    net.stem.weight[:2] = 0  # channels 0 and 1
    net.fc2.weight[1:3] = 0  # channels 1 and 2
    seen = observe.observe(net, call)
    assert (~seen.live_out["stem"]).nonzero().flatten().tolist() == [1]
    assert (~seen.live_out["fc2"]).nonzero().flatten().tolist() == [1]
    masks = seen.masks()
    assert int(masks["head.weight"].sum()) == 3 and bool(masks["head.weight"][:, 1].all())
    assert int(masks["fc1.weight"].sum()) == 8 and int(masks["stem.weight"].sum()) == 4


@torch.no_grad()
def test_an_unread_channel_is_dead_on_the_writers_side_too() -> None:
    net, call = Residual().double(), ((torch.randn(3, 4, dtype=torch.float64),), {})
    net.fc2.weight[:, 5] = 0  # the only reader of fc1
    net.head.weight[:, 6] = 0  # not the only reader of the stream
    seen = observe.observe(net, call)
    assert (~seen.live_out["fc1"]).nonzero().flatten().tolist() == [5]
    assert seen.dead_in["fc2"].nonzero().flatten().tolist() == [5]
    assert not bool(seen.dead_in["head"].any()) and bool(seen.live_out["stem"].all())


@torch.no_grad()
def test_a_relu_that_happens_to_be_off_is_not_dead() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    net[0].bias[:] = -100.0
    seen = observe.observe(net, ((torch.randn(3, 4, dtype=torch.float64),), {}))
    assert not any(bool(mask.any()) for mask in seen.masks().values())


# -------------------------------------------------------------------------------------------------------------- planter


def test_the_planter_knows_nothing_of_the_analysis() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import planter; print('squeeze_release' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_planted_entries_can_go_without_a_trace() -> None:
    """Every planted entry may be any number at once, as far as the output goes, but for what its own constants say."""
    torch.manual_seed(0)
    net = Residual().double()
    call = ((torch.randn(3, 4, dtype=torch.float64),), {})
    plants = planter.plant(net, call, seed=3)
    assert plants.count > 0
    for name, mask in plants.masks.items():
        assert mask.shape == net.get_parameter(name).shape
    zeros = sum(int((p == 0).sum()) for p in net.parameters())
    assert plants.count > zeros > 0  # biases and columns that read constants belong to a dead channel too


def test_noise_leaves_no_parameter_constant() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LayerNorm(6)).double()
    noise.add_noise(net, torch.Generator().manual_seed(0))
    for tensor in [*net.parameters(), net[1].running_mean, net[1].running_var]:
        assert tensor.flatten().unique().numel() > 1


def test_a_scale_that_begins_at_zero_stays_small() -> None:
    """Residual branches at full size blow up rounding from block to block, until no two computations agree."""
    net = nn.Sequential(nn.BatchNorm2d(8), nn.BatchNorm2d(8)).double()
    nn.init.zeros_(net[0].weight)
    noise.add_noise(net, torch.Generator().manual_seed(0))
    small, usual = (norm.weight.detach() for norm in net)
    assert bool(((small >= 0.1) & (small <= 0.3)).all()) and bool(((usual >= 0.5) & (usual <= 1.5)).all())


def test_norms_fit_the_data_when_all_is_planted() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 5, 1)).double()
    plants = planter.plant(net, _images(3), 0, _images(64))
    rows = net[0](_images(64)[0][0]).detach().movedim(1, 0).flatten(1)
    alive = ~plants.masks["0.weight"].flatten(1).all(1)
    ratio = (net[1].running_var / rows.var(1))[alive]  # drawn between 0.7 and 1.3
    assert bool(alive.any()) and bool(((ratio > 0.6) & (ratio < 1.4)).all())


def test_norms_of_dead_channels_do_not_blow_up_rounding() -> None:
    """A constant that its norm takes for a channel of variance 0 comes out with 30 to 300 times its rounding."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 5, 1)).double()
    plants = planter.plant(net, _images(3), 0, _images(64))
    dead = plants.masks["0.weight"].flatten(1).all(1)
    assert bool(dead.any()) and bool((net[1].running_var[dead] > 0.01).all())


def test_streams_are_what_several_write_or_read() -> None:
    net, call = Residual().double(), ((torch.randn(3, 4, dtype=torch.float64),), {})
    assert streams.stream_writers(net, call, observe.leaves(net)) == {"stem", "fc2"}
    chain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)).double()
    assert not streams.stream_writers(chain, call, observe.leaves(chain))


class Mlp(nn.Module):
    """A block with or without a way around it."""

    def __init__(self, around: bool) -> None:
        super().__init__()
        self.around, self.fc1, self.fc2 = around, nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).tanh()) + (x if self.around else 0.0)


@pytest.mark.parametrize("around", [True, False])
def test_no_block_dies_that_is_the_only_way(around: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), *[Mlp(around) for _ in range(4)], nn.Linear(16, 3)).double()
    call = ((torch.randn(3, 4, dtype=torch.float64),), {})
    plants = planter.plant(net, call, seed=0)
    assert ("block" in plants.kinds) is around
    out = net(*call[0]).detach()
    assert float((out - out[0]).abs().max()) > 1e-3


def test_chunks_lose_equally_many() -> None:
    """Half a grouped convolution cannot be narrower than the other half."""
    net = nn.Sequential(nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 3, groups=4), nn.Conv2d(32, 16, 1)).double()
    plants = planter.plant(net, _images(3), seed=0)
    rows = plants.masks["0.weight"].flatten(1).all(1)
    assert rows.view(4, 8).sum(1).unique().numel() == 1 and bool(rows.any())


class Pieces(nn.Module):
    """Grouped convolutions that read a layer piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 1)
        self.convs = nn.ModuleList(nn.Conv2d(32, 32, 3, groups=4) for _ in range(2))
        self.last = nn.Conv2d(64, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = self.first(x).split(self.first.out_channels // 2, 1)
        return self.last(torch.cat([conv(piece) for conv, piece in zip(self.convs, pieces, strict=True)], 1))


def test_pieces_lose_equally_many_in_every_group() -> None:
    plants = planter.plant(nn.Sequential(Pieces(), nn.Conv2d(16, 5, 1)).double(), _images(3), seed=0)
    first, conv = (plants.masks[f"0.{name}.weight"].flatten(1).all(1) for name in ("first", "convs.0"))
    assert torch.equal(first, conv.repeat(2)) and conv.view(4, 8).sum(1).tolist() == [2] * 4


class Laid(nn.Module):
    """The convolution breaks the stream, but the code takes what comes out for as wide as what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.local = nn.Linear(16, 16), nn.Conv1d(16, 16, 3, padding=1, groups=16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, N, C = x.shape
        x = x + self.mix(x)
        return self.local(x.transpose(1, 2)).reshape(B, C, N).transpose(1, 2)


def test_no_writer_in_a_block_loses_what_the_stream_in_front_keeps() -> None:
    """The model's input never dies, and then nothing behind it does; what a layer writes does."""
    alone = nn.Sequential(Laid(), nn.Linear(16, 5)).double()
    behind = nn.Sequential(nn.Linear(4, 16), Laid(), nn.Linear(16, 5)).double()
    plants = [planter.plant(net, (((torch.randn(3, 6, w).double()),), {}), 0) for net, w in ((alone, 16), (behind, 4))]
    assert "0.local.weight" not in plants[0].masks and bool(plants[1].masks["1.local.weight"].any())


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_planted_is_removed(zoo: Path, seed: int) -> None:
    mlp, conv = coverage.entries(str(zoo))[:2]
    for entry in (mlp, conv):
        row = coverage.examine(entry, seed)
        assert row.status == "exact", row
        assert int(row.planted) > 0.2 * int(row.params_before)
        assert 0 < int(row.removed_planted) <= int(row.planted)


def test_another_network_is_called_wrong(zoo: Path) -> None:
    entry = coverage.entries(str(zoo))[0]
    old, new = entry.build().double(), entry.build().double()
    call = entry.inputs(5, torch.Generator().manual_seed(0))
    assert coverage.compare(old, old, call) == 0.0
    assert coverage.compare(old, new, call) > 0.01


def test_remaining_counts_entries_that_still_exist() -> None:
    small = nn.Linear(3, 2)
    masks = {"weight": torch.zeros(4, 3, dtype=torch.bool), "gone.weight": torch.ones(5, dtype=torch.bool)}
    masks["weight"][1:3] = True
    report = SimpleNamespace(slices={"weight": {0: torch.tensor([0, 2])}}, group_columns={})
    assert coverage.remaining(masks, report, small) == {"weight": 3}


def test_remaining_follows_the_columns_of_every_group() -> None:
    masks = {"weight": torch.zeros(4, 2, 3, 3, dtype=torch.bool)}
    masks["weight"][:2, 0] = masks["weight"][2:, 1] = True  # group 0 loses its column 0, group 1 its column 1
    kept = torch.tensor([[1], [1], [1]])  # of rows 0, 1 and 3: of the last, what was planted stayed
    report = SimpleNamespace(slices={"weight": {0: torch.tensor([0, 1, 3])}}, group_columns={"weight": kept})
    assert coverage.remaining(masks, report, nn.Conv2d(2, 3, 3)) == {"weight": 9}


# --------------------------------------------------------------------------------------------------------------- runner


@pytest.mark.slow
def test_a_model_that_fails_gives_a_row(zoo: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    for only, *limits in (("tests",), ("slow", "--time-limit", "1"), ("large", "--memory-limit", "50")):
        done = _run(zoo, out, "--jobs", "2", "--only", only, *limits)
        assert done.returncode == 0, done.stderr
    rows = {row.model: row for row in coverage.read_rows(out)}
    status = {name: row.status for name, row in rows.items()}
    assert status == {
        "tiny_mlp": "exact",
        "tiny_conv": "exact",
        "broken": "error",
        "crash": "error",
        "slow": "timeout",
        "large": "memory",
        "branches": "refused",
    }
    assert "no such model" in rows["broken"].reason and "SIGABRT" in rows["crash"].reason
    assert "torch.export" in rows["branches"].way_out
    text = coverage_page.page(list(rows.values()), "rows.csv")
    assert "7 families: 2 exact, 1 refused, 0 wrong, 4 failed" in text
    assert "`tiny_mlp`" in text and "## Refused" in text and "**timeout**" in text


@pytest.mark.slow
def test_a_run_goes_on_where_it_was(zoo: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    assert _run(zoo, out, "--only", "tiny_mlp").returncode == 0
    (row,) = coverage.read_rows(out)
    row.reason = "not computed again"
    other = coverage.Row("tiny_conv", "tiny_conv", "tests", "exact", "of other code", seed=0, source="another")
    coverage.write_rows(out, [row, other])
    with out.open("a") as file:
        file.write("half,a,ro")
    assert _run(zoo, out, "--only", "tiny_*").returncode == 0
    rows = {row.model: row for row in coverage.read_rows(out)}
    assert rows["tiny_mlp"].reason == "not computed again"
    assert rows["tiny_conv"].reason != "of other code" and len(rows) == 2


def test_the_zoo_lists_every_family() -> None:
    zoo = _load("squeeze_zoo", "zoo.py")
    assert not zoo.missing_timm_families()
    names = [entry.name for entry in zoo.ENTRIES]
    assert len(set(names)) == len(names)
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "coverage.py"), "--list", "--only", "gpt2"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "GPT2LMHeadModel" in done.stdout
