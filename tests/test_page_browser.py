"""The report page in a real Chromium: nothing fails, nothing is fetched, all of it can be read, and a click sorts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from pages import HOSTILE, bench, browser, report

from squeeze_release.page import write_page
from squeeze_release.report import Kept, Layer

PHONE = {"viewport": {"width": 360, "height": 740}}
DESKTOP = {"viewport": {"width": 1200, "height": 900}}

# Of every text that is shown: its contrast with what is behind it, by WCAG 2.
CONTRASTS = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("script, title") || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const [one, other] = [parse(element.closest("svg") ? style.fill : style.color), behind(element)].map(light);
    found.push([(Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05), walker.currentNode.data]);
  }
  return found;
}"""

# Pairs of texts in one picture that lie over each other.
OVERLAPS = """() => [...document.querySelectorAll("svg.chart")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")].filter((each) => each.textContent);
  const boxes = texts.map((each) => each.getBoundingClientRect());
  return boxes.flatMap((a, i) => boxes.slice(i + 1).map((b, j) => [a, b, i, i + 1 + j]))
    .filter(([a, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
    .map(([, , i, j]) => texts[i].textContent + " | " + texts[j].textContent);
})"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run; a squeeze with long names and many layers; and one whose names are hostile."""
    folder = tmp_path_factory.mktemp("pages")
    tiny.run(replace(tiny.CONFIG, min_accuracy=0.9), run_dir=folder / "run")
    part = "a_rather_long_name_of_a_layer_that_does_not_break"
    layers = [
        Layer(f"stages.{i}.{part}.{j}", "512 -> 2048", "512 -> 90", 10**6, 10**4) for i in range(30) for j in (1, 2)
    ]
    kept = [
        Kept(f"stages.{i}.{part}", "outputs", (7 * i) % 30, f"stages.{i + 1}.{part} (aten.conv2d): reads it")
        for i in range(30)
    ]
    bad = report([Layer(HOSTILE, HOSTILE, HOSTILE, 9, 3)] * 3, [Kept(HOSTILE, HOSTILE, 3, HOSTILE)])
    files = {name: folder / f"{name}.html" for name in ("run", "squeeze", "hostile")}
    write_page(files["run"], run_dir=folder / "run", bench=bench("masked", "small"), command="squeeze-release " * 20)
    write_page(files["squeeze"], report=report(layers, kept), command="x" * 200)
    write_page(files["hostile"], report=bad, bench=bench(HOSTILE, "small"), command=HOSTILE)
    return files


def opened(page: Any, file: Path) -> tuple[list[str], list[str]]:
    """What it complains about, and what it asks for."""
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    return said, asked


@pytest.mark.parametrize("name", ["run", "squeeze", "hostile"])
def test_on_a_phone(pages: dict[str, Path], name: str) -> None:
    with browser(**PHONE) as page:
        said, asked = opened(page, pages[name])
        assert said == [] and asked == [pages[name].as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate(OVERLAPS) == []
        assert page.evaluate("window.hacked") is None


def test_colours_in_the_light_and_in_the_dark(pages: dict[str, Path]) -> None:
    papers = []
    with browser(**DESKTOP) as page:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for name in ("run", "squeeze"):
                opened(page, pages[name])
                contrasts = page.evaluate(CONTRASTS)
                assert len(contrasts) > 60
                assert [(ratio, text) for ratio, text in contrasts if ratio < 4.5] == []
            papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            papers.append(page.evaluate("getComputedStyle(document.querySelector('.bar .a')).backgroundColor"))
    assert len({*papers}) == 4


def test_a_click_on_a_heading_sorts(pages: dict[str, Path]) -> None:
    with browser(**DESKTOP) as page:
        opened(page, pages["squeeze"])
        table = page.locator("table.prose")

        def column(place: int) -> list[str]:
            return [str(text) for text in table.locator(f"tbody tr > :nth-child({place})").all_inner_texts()]

        assert [int(number) for number in column(2)] == sorted(range(30), reverse=True)  # as it is written
        table.get_by_role("button", name="channels").click()
        assert [int(number) for number in column(2)] == [*range(30)]
        table.get_by_role("button", name="channels").click()
        assert [int(number) for number in column(2)] == [*range(29, -1, -1)]
        assert table.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
        table.get_by_role("button", name="layer").press("Enter")
        assert [name.split(".")[1] for name in column(1)] == [str(number) for number in range(30)]  # 2 before 10
        assert table.locator("th[aria-sort]").count() == 1


def test_without_javascript_all_is_there(pages: dict[str, Path]) -> None:
    with browser(**DESKTOP, java_script_enabled=False) as page:
        page.goto(pages["squeeze"].as_uri())
        assert page.locator("table.prose tbody tr").count() == 30
        block = page.locator("details").first
        assert not block.locator("table").is_visible()
        block.locator("summary").click()
        assert block.locator("table").is_visible()


def test_on_paper_all_blocks_are_open(pages: dict[str, Path], tmp_path: Path) -> None:
    with browser(**DESKTOP) as page:
        opened(page, pages["squeeze"])
        assert page.locator("details[open]").count() == 0
        page.pdf(path=tmp_path / "page.pdf")
        assert page.locator("details[open]").count() == page.locator("details").count() == 30
