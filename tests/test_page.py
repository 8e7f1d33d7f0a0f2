"""The report page as a file: what is on it, what is not, and that nothing in it can run or reach out."""

from __future__ import annotations

import base64
import getpass
import hashlib
import json
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import stored
import tiny
import torch
from pages import HOSTILE, Element, bench, cells, parsed, report
from torch import nn

import squeeze_release as sr
from squeeze_release.errors import InputError
from squeeze_release.page import charts, formats, groups, write_page
from squeeze_release.page.run_files import read_run
from squeeze_release.page.stored_layers import stored_layers
from squeeze_release.report import Kept, Layer

Write = Callable[..., Element]
X = formats.TIMES


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(**arguments: object) -> Element:
        write_page(tmp_path / "page.html", **arguments)  # type: ignore[arg-type]
        return parsed((tmp_path / "page.html").read_text(encoding="utf-8"))

    return write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    tiny.run(replace(tiny.CONFIG, min_accuracy=0.9), run_dir=folder)
    return folder


@pytest.fixture
def changed(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture(scope="module")
def squeezed() -> sr.Squeezed:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 20), nn.Linear(20, 4))
    with torch.no_grad():
        net[0].weight[:20] = 0
        net[3].weight[:, 25:] = 0
    return sr.squeeze(net.eval(), torch.randn(2, 12))


def headings(page: Element) -> list[str]:
    return [heading.text for heading in page.all("h2")]


def cards(page: Element) -> dict[str, str]:
    return {card.one("span").text: card.one("strong").text for card in page.one("ul", "cards").all("li")}


# -------------------------------------------------------------------------------------------------------- what is on it


def test_a_squeeze(write: Write, squeezed: sr.Squeezed) -> None:
    done = squeezed.report
    page = write(report=done, command="squeeze-release squeeze")
    assert page.one("h1").text == f"{done.params_before:,} parameters became {done.params_after:,}"
    assert cards(page) == {
        "smaller": formats.ratio(done.params_before, done.params_after),
        "exact to": formats.power(done.max_error or 0.0),
    }
    assert headings(page) == ["Where the fat was", "Sizes", "What stayed, and why", "How it was checked", "Made with"]
    rows = page.one("ol", "layers").all("li")
    assert [row.one("span", "layer").text for row in rows] == [layer.name for layer in done.layers] + [
        "layers that did not change"
    ]
    assert rows[0].one("span", "width").text == f"12 {X} 30 → 12 {X} 5"
    assert rows[1].one("span", "width").text == "BatchNorm1d 30 → 5"
    assert rows[0].one("span", "params").text == "390 → 65"
    assert page.one("code").text == "squeeze-release squeeze"


def test_a_run(write: Write, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    page = write(run_dir=run, bench=bench("masked", "small"))
    assert page.one("h1").text == f"{summary['unpruned_params']:,} parameters became {summary['deployable_params']:,}"
    assert cards(page) == {
        "smaller": formats.ratio(summary["unpruned_params"], summary["deployable_params"]),
        "exact to": formats.power(summary["max_error"]),
        "faster": f"4.00{X}",
        "test accuracy": formats.percent(summary["accuracy"]),
    }
    names = ["Size and accuracy", "Over the epochs", "Where the fat was", "Sizes", "Speed", "Made with"]
    assert headings(page) == names
    assert [each.text for each in page.all("figcaption")][:1] == ["Validation accuracy against size"]
    assert len(page.all("svg", "chart")) == 5
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [line for line in lines if line["event"] == "cycle"]
    table = cells(page.all("table")[0])
    assert [row[1] for row in table] == [f"{point['deployable_params']:,}" for point in points]
    assert len(page.all("svg", "chart")[0].all("circle", "s1")) == len(points)
    assert len(page.all("svg", "chart")[0].all("line", "floor")) == 1
    assert sum("◎" in row[0] for row in table) == len(page.all("svg", "chart")[0].all("circle", "ring")) == 1


def test_the_network_that_was_chosen_is_the_one_that_came_out(tmp_path: Path) -> None:
    free = replace(tiny.CONFIG, grain="channel", threshold=0.0, max_drop=1.0, last_ratio=0.3, max_cycles=2)
    result = tiny.run(free)
    start, last, end = result.points[0].accuracy, result.points[-1].accuracy, result.summary["validation_accuracy"]
    assert last < end - 1e-6  # so it reaches that floor in its last fine-tuning only
    for name, value in (("min_accuracy", end - 1e-6), ("max_loss", start - end + 1e-6)):
        tiny.run(replace(free, final_gain=1.0, **{name: value}), run_dir=tmp_path / name)  # type: ignore[arg-type]
        read = read_run(tmp_path / name)
        assert read.chosen == read.points[-1] == result.points[-1]
        assert read.floor == pytest.approx(end - 1e-6, abs=1e-12)
        assert replace(read, summary=None).chosen is None


def test_a_baseline_is_drawn_by_what_is_not_zero(write: Write, tmp_path: Path) -> None:
    tiny.run(replace(tiny.CONFIG, mode="baseline"), run_dir=tmp_path / "run")
    page = write(run_dir=tmp_path / "run")
    assert "weights not zero" in page.all("svg", "chart")[0].text


def test_a_measurement_alone(write: Write) -> None:
    page = write(bench=bench("masked", "small", "small, compiled", batches=(8,)))
    assert headings(page) == ["Speed", "Made with"] and cards(page) == {"faster": f"9.00{X}"}
    assert [row[3] for row in cells(page.one("table"))] == [f"1.00{X}", f"4.00{X}", f"9.00{X}"]
    assert write(bench=bench("masked")).all("strong") == []  # nothing to compare with
    slower = bench("small", "masked")
    slower.to_dict()["rows"].sort(key=lambda row: row["seconds_median"])
    assert cards(write(bench=slower)) == {"as fast": f"0.25{X}"}


def test_what_is_not_there_is_not_on_the_page(write: Write, changed: Path) -> None:
    for name in ("summary.json", "final.safetensors"):
        (changed / name).unlink()
    page = write(run_dir=changed)
    assert "not finished" in page.one("header").text and "test accuracy" not in cards(page)
    assert "Where the fat was" in headings(page) and "Sizes" not in headings(page)
    for file in changed.glob("*.safetensors"):
        file.unlink()
    assert "Where the fat was" not in headings(write(run_dir=changed))
    (changed / "metrics.jsonl").unlink()
    assert headings(write(run_dir=changed)) == ["Made with"]


def test_a_squeeze_that_was_not_verified_or_found_nothing(write: Write) -> None:
    page = write(report=report([Layer("0", "4 -> 8", "4 -> 2", 40, 10)], verified=False))
    assert cards(page)["not verified"] == formats.NONE and "How it was checked" not in headings(page)
    page = write(report=report([]))
    assert page.one("h1").text == "Nothing became smaller" and "Where the fat was" not in headings(page)


def test_there_must_be_something_to_write_about(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to write about"):
        write_page(tmp_path / "page.html")


def test_it_is_well_formed_and_says_what_its_pictures_show(write: Write, run: Path, squeezed: sr.Squeezed) -> None:
    page = write(report=squeezed.report, run_dir=run, bench=bench("masked", "small"))
    assert all(table.one("caption").text for table in page.all("table"))
    assert all(head.attributes["scope"] in ("col", "row") for head in page.all("th"))
    pictures = [svg for svg in page.all("svg") if svg.attributes.get("aria-hidden") != "true"]
    assert len(pictures) == 6
    for svg in pictures:
        first = svg.children[0]
        assert svg.attributes["role"] == "img" and isinstance(first, Element) and first.name == "title" and first.text
    for row in [row for table in page.all("table") for row in table.all("tr")]:
        assert len(row.children) == len(cells_of_head(page, row))
    for number in (each for each in page if "data-value" in each.attributes):
        float(number.attributes["data-value"])


def cells_of_head(page: Element, row: Element) -> list[Element]:
    table = next(table for table in page.all("table") if row in [*table])
    return table.one("thead").all("th")


# ------------------------------------------------------------------------------------ nothing runs, nothing reaches out


def test_it_refers_to_nothing_outside(write: Write, run: Path, squeezed: sr.Squeezed) -> None:
    page = write(report=squeezed.report, run_dir=run, bench=bench("masked", "small"))
    names = {name for element in page for name in element.attributes}
    assert not names & {"src", "href", "xlink:href", "action", "data", "srcset", "poster", "background"}
    assert not {element.name for element in page} & {"link", "img", "iframe", "object", "embed", "base", "form", "a"}
    assert not re.search(r"url\(|@import|https?:|//\w", page.one("style").text + page.one("script").text)
    policy = next(m.attributes["content"] for m in page.all("meta") if "http-equiv" in m.attributes)
    digest = base64.b64encode(hashlib.sha256(page.one("script").text.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def hostile_report() -> sr.Report:
    layers = [Layer(f"{HOSTILE}.{i}.{HOSTILE}", f"{HOSTILE} 8", f"{HOSTILE} 4", 800, 400) for i in range(60)]
    return report(layers, [Kept(HOSTILE, HOSTILE, 3, HOSTILE)])


def test_names_cannot_become_part_of_the_page(write: Write, run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / HOSTILE.replace("/", "|")))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), "phase": HOSTILE})
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    measured = bench(HOSTILE, "small")
    measured.to_dict()["device"] = HOSTILE
    for page in (
        write(report=hostile_report(), bench=measured, command=HOSTILE),
        write(run_dir=folder, bench=measured, command=HOSTILE),
    ):
        assert len(page.all("script")) == 1 and page.all("img") == []
        assert not [name for element in page for name in element.attributes if name.startswith("on")]
        assert page.text.count("window.hacked") > 3


def test_it_does_not_say_who_or_where(write: Write, run: Path) -> None:
    command = f"squeeze-release run --run-dir {run.resolve()} --data={Path.home()}/mnist -o '/a/b c'"
    page = write(run_dir=run, command=command)
    assert page.one("code").text == "squeeze-release run --run-dir …/tiny --data=…/mnist -o '…/b c'"
    told = page.text.replace(page.one("style").text, "")
    assert str(run.parent) not in told and str(Path.home()) not in told
    for secret in (platform.node(), getpass.getuser()):
        assert not re.search(rf"\b{re.escape(secret)}\b", told), secret
    assert {"squeeze-release", "Python", "torch", "platform", "threads"} == {each.text for each in page.all("dt")}


# ---------------------------------------------------------------------------------------------------------- many layers


def test_a_thousand_layers(write: Write, tmp_path: Path) -> None:
    names = [f"model.layers.{i}.{part}" for i in range(125) for part in "a b c d e f g h".split()]
    page = write(report=report([Layer(name, "512 -> 2048", "512 -> 700", 1_000_000, 350_000) for name in names]))
    assert len(page.one("ol", "layers").all("li")) <= groups.MOST + 1
    shown = [cell for table in page.all("table", "inner") for cell in cells(table)]
    assert len(shown) == 1000
    assert (tmp_path / "page.html").stat().st_size < 400_000


# ------------------------------------------------------------------------------------------- the layers of stored files


@pytest.mark.parametrize(("name", "compaction"), [("convnext_tiny", None), ("encoder", "index"), ("llama", "index")])
def test_stored_layers_are_those_of_the_report(name: str, compaction: str | None, tmp_path: Path) -> None:
    model = stored.prune(stored.MODELS[name]().eval(), 0)
    small, done = sr.squeeze(model, stored.inputs(name), compaction=compaction, verify=False)
    sr.save(small, tmp_path / "small.safetensors")
    layers = stored_layers(tmp_path / "small.safetensors")
    assert sum(layer.params_before for layer in layers) == done.params_before
    assert sum(layer.params_after for layer in layers) == done.params_after
    found = {layer.name: layer for layer in layers}
    assert [found[layer.name] for layer in done.layers] == [*done.layers]


@pytest.mark.parametrize("name", stored.NETS)
def test_stored_layers_of_stand_ins(name: str, tmp_path: Path) -> None:
    full, small, _ = stored.NETS[name]
    network = small()
    sr.save(network, tmp_path / "small.safetensors")
    layers = stored_layers(tmp_path / "small.safetensors")
    for model, at in ((full(), "params_before"), (network, "params_after")):
        assert sum(getattr(layer, at) for layer in layers) == sum(p.numel() for p in model.parameters())


# ----------------------------------------------------------------------------------------------- files that are damaged


def test_a_page_can_be_written_at_any_moment_of_a_run(write: Write, changed: Path) -> None:
    for name in ("summary.json", "final.safetensors"):
        (changed / name).unlink()
    lines = (changed / "metrics.jsonl").read_text().splitlines(keepends=True)
    for many in range(len(lines) + 1):
        (changed / "metrics.jsonl").write_text("".join(lines[:many]))
        page = write(run_dir=changed)
        epochs = sum('"event": "epoch"' in line for line in lines[:many])
        assert f"{epochs} epoch" in page.one("header").text
        assert ("Over the epochs" in headings(page)) == (epochs > 0)
        for strip in page.all("rect", "phase"):
            left, width = float(strip.attributes["x"]), float(strip.attributes["width"])
            assert charts.LEFT <= left <= left + width <= charts.RIGHT + 0.2 or left < charts.LEFT  # of a legend


def test_a_run_that_is_just_writing_a_line_can_be_read(changed: Path) -> None:
    whole = read_run(changed)
    with (changed / "metrics.jsonl").open("a") as file:
        file.write('{"event": "epo')
    assert read_run(changed) == whole


@pytest.mark.parametrize(
    ("file", "old", "new", "error"),
    [
        ("metrics.jsonl", "{", "", "not JSON\n  where:       line 1 of metrics.jsonl"),
        ("metrics.jsonl", '"event": "epoch"', '"event": "other"', "neither an epoch, a squeeze nor a cycle"),
        ("metrics.jsonl", '"accuracy": ', '"accuracy": "x", "was": ', "accuracy is 'x', not a float"),
        ("metrics.jsonl", '"seconds"', '"hours"', "without seconds"),
        ("metrics.jsonl", '"phase": "train"', '"phase": []', r"phase is \[\], not a str"),
        ("metrics.jsonl", '"alive": ', '"alive": 1e999, "was": ', "alive is inf, not a int"),
        ("config.json", "{", "", "not JSON"),
        ("config.json", '"min_accuracy": 0.9', '"min_accuracy": NaN', "min_accuracy is nan, no number"),
        ("config.json", '"min_accuracy": 0.9', '"min_accuracy": "high"', "min_accuracy is 'high', no number"),
        ("config.json", '"max_loss": null', '"max_loss": "low"', "max_loss is 'low', no number"),
        ("summary.json", '"accuracy"', '"precision"', "without accuracy"),
    ],
)
def test_a_file_that_was_changed_is_an_error(changed: Path, file: str, old: str, new: str, error: str) -> None:
    text = (changed / file).read_text()
    assert old in text
    (changed / file).write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=error):
        write_page(changed / "page.html", run_dir=changed)
    assert not (changed / "page.html").exists()


def test_a_damaged_network_is_an_error(changed: Path) -> None:
    (changed / "final.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(InputError, match=r"final.safetensors cannot be read"):
        write_page(changed / "page.html", run_dir=changed)


def test_no_run_and_no_place_to_write(tmp_path: Path, run: Path) -> None:
    with pytest.raises(InputError, match=r"config.json cannot be read: FileNotFoundError"):
        write_page(tmp_path / "page.html", run_dir=tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"page.html cannot be written: No such file or directory"):
        write_page(tmp_path / "nowhere" / "page.html", run_dir=run)
    with pytest.raises(InputError, match="bench has no measurement: AttributeError"):
        write_page(tmp_path / "page.html", bench=3)


def test_numbers_that_are_none_leave_gaps(write: Write, changed: Path) -> None:
    text = (changed / "metrics.jsonl").read_text()
    (changed / "metrics.jsonl").write_text(re.sub(r'"accuracy": [0-9.]+', '"accuracy": NaN', text))
    page = write(run_dir=changed)
    assert not [each for each in page for value in each.attributes.values() if value.lower() in ("nan", "inf")]
    assert not [path for path in page.all("path") if "nan" in path.attributes["d"].lower()]
