"""The small parts of the report page: numbers, paths, groups of layers, axes and lines."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType

import pytest
from pages import parsed

from squeeze_release.page import charts, drawing, environment, formats, groups, markup
from squeeze_release.report import Layer

X = formats.TIMES


def test_numbers_as_people_read_them() -> None:
    assert [formats.power(n) for n in (9.36e-16, 1e-10, 0.0, 0.02, 1.0)] == [f"9.4{X}10⁻¹⁶", "10⁻¹⁰", "0", "0.02", "1"]
    ratios = [formats.ratio(n, 1) for n in (1, 9.994, 9.996, 40.11, 1234)]
    assert ratios == [f"{each}{X}" for each in ("1.00", "9.99", "10.0", "40.1", "1,234")]
    assert formats.ratio(3, 0) == formats.ratio(0, 3) == formats.percent(float("nan")) == formats.NONE
    assert [formats.compact(n) for n in (5, 1000, 1500, 193226, 2e6)] == ["5", "1k", "1.5k", "193k", "2M"]
    assert [formats.duration(n) for n in (3e-7, 5.1e-4, 0.0123, 2.5, 600)] == [
        "0.3 µs",
        "510 µs",
        "12.3 ms",
        "2.5 s",
        "10.0 min",
    ]
    assert [formats.size(n) for n in (12, 772904, 4e9)] == ["12 B", "773 kB", "4 GB"]


@pytest.mark.parametrize("module", [markup, environment])
def test_examples_in_docstrings(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values", [(0.94, 0.9774), (3, 3), (1, 1e12), (0, 101), (1937, 193226), (1e-16, 1e-10), (0.5, 0.5001)]
)
def test_axes_have_a_few_ticks_in_order_and_in_range(values: tuple[float, float], log: bool) -> None:
    axis = charts.y_axis(values, "", str, log=log)
    assert 1 <= len(axis.ticks) <= 8 and list(axis.ticks) == sorted({*axis.ticks})
    places = [axis(tick) for tick in axis.ticks]
    assert all(charts.TOP <= place <= charts.BOTTOM for place in places)
    assert all(charts.TOP <= axis(value) <= charts.BOTTOM for value in values if value > 0 or not log)


def test_long_lines_are_thinned_and_keep_their_peaks() -> None:
    points = [(float(i), 1.0) for i in range(20_000)]
    points[7_777] = (7_777.0, 9.0)
    x, y = charts.x_axis([0.0, 20_000.0], "", str), charts.y_axis([0.0, 10.0], "", str)
    drawn = charts.line(points, x, y, "s1")
    assert len(drawn) < 12_000 and f" {y(9.0)}" in drawn and f"L{x(19_999.0)} " in drawn


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("x ~/a/b.pt", "x …/b.pt"),
        (r"x C:\Users\ada\b.pt", "x …/b.pt"),
        ("x runs/fc ../b timm:convnext_tiny?a=1 1x3x4", "x runs/fc ../b timm:convnext_tiny?a=1 1x3x4"),
        ("/usr/bin/python -m x /", "…/python -m x …/"),
        ("x '--data=/home/ada l/my data/a b' \"/b/c d\" 'e /f/g'", "x '--data=…/a b' \"…/c d\" 'e …/g'"),
        ("x https://a/b a/b:c/d", "x https://a/b a/b:c/d"),
    ],
)
def test_absolute_paths_are_shortened(command: str, shown: str) -> None:
    assert environment.without_paths(command) == shown


@pytest.mark.parametrize(
    ("names", "first", "many"),
    [
        ([f"{i}" for i in range(1000)], "0 … 24", 40),
        ([f"blocks.{i}.{p}" for i in range(12) for p in ("qkv", "proj", "fc1", "fc2")], "blocks.0", 12),
        ([f"a.{i}.b.{j}.c" for i in range(50) for j in range(3)], "a.0 … 1", 25),
        ([f"{s}.{i}.{j}" for s in "abcdefghij" for i in range(9) for j in range(3)], "a", 10),
        (["0", "2", "4.x"], "0", 3),
        ([], "", 0),
    ],
)
def test_groups_of_layers(names: list[str], first: str, many: int) -> None:
    found = groups.grouped(tuple(Layer(name, "", "", 2, 1) for name in names))
    assert len(found) == many and [layer.name for group in found for layer in group.layers] == names
    assert not found or (found[0].name == first and found[0].before == 2 * len(found[0].layers))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("784 -> 128", "95 -> 32", f"784 {X} 128 → 95 {X} 32"),
        ("64 -> 64", "48 -> 48 of 64", f"64 {X} 64 → 48 {X} 48 of 64"),
        ("BatchNorm1d 128", "BatchNorm1d 32", "BatchNorm1d 128 → 32"),
        ("LayerNorm 96", "CompensatedLayerNorm 60", "LayerNorm 96 → CompensatedLayerNorm 60"),
        ("BatchNorm1d 128", "BatchNorm1d 128", "BatchNorm1d 128"),
        ("Block 384", "Passthrough", "Block 384 → Passthrough"),
    ],
)
def test_widths_of_a_layer(before: str, after: str, said: str) -> None:
    (row,) = parsed(f"<html>{drawing.bars((Layer('0', before, after, 9, 3),))}</html>").all("li")
    assert row.one("span", "width").text == said


def test_the_silhouette_has_the_input_every_layer_and_the_blocks_that_are_gone() -> None:
    layers = [
        ("0", "784 -> 128", "95 -> 32"),
        ("1", "BatchNorm1d 128", "BatchNorm1d 32"),
        ("2", "Block 384", "Passthrough"),
    ]
    figure = parsed(f"<html>{drawing.silhouette(tuple(Layer(*each, 9, 3) for each in layers))}</html>")
    said = [group.one("title").text for group in figure.all("g")]
    assert said == ["input: 784 → 95", "0: 128 → 32", "2: 384 → 0"]
    heights = [float(rect.attributes["height"]) for rect in figure.one("svg", "silhouette").all("rect")]
    assert heights == pytest.approx([160, 19.39, 26.12, 6.53, 78.37, 0], abs=0.01)
    assert drawing.silhouette((Layer("1", "BatchNorm1d 128", "BatchNorm1d 32", 9, 3),)) == ""


def test_many_slabs_are_pooled() -> None:
    layers = tuple(Layer(f"{i}", "8 -> 8", f"8 -> {i % 2 * 8}", 9, 3) for i in range(1000))
    figure = parsed(f"<html>{drawing.silhouette(layers)}</html>")
    assert len(figure.all("g")) <= 120 and "1001 layers" in figure.one("figcaption").text
    assert {group.one("title").text.partition(": ")[2] for group in figure.all("g")} <= {"8 → 4", "8 → 5", "8 → 6"}


def test_all_files_of_the_page_go_into_the_wheel() -> None:
    toml = pytest.importorskip("tomllib")
    root = Path(__file__).resolve().parents[1]
    listed = toml.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["squeeze_release"]
    folder = root / "src" / "squeeze_release"
    assert {*listed} >= {
        f"page/{path.name}" for path in (folder / "page").iterdir() if path.suffix in (".html", ".css", ".js")
    }
    assert all((folder / name).exists() for name in listed)
