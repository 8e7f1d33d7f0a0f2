"""What tests of the report page share: a page as a tree, things to write about, and a browser."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

import squeeze_release as sr
from squeeze_release.masks import Counts
from squeeze_release.report import Kept, Layer, Report
from squeeze_release.verify import Verification

HOSTILE = '"><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">'
_VOID = {"meta", "wbr"}


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, name: str, class_: str = "") -> list[Element]:
        """Elements of a name below this one, those of a class only if one is given."""
        found = [inner for inner in self if inner.name == name]
        return [each for each in found if not class_ or class_ in each.attributes.get("class", "").split()]

    def one(self, name: str, class_: str = "") -> Element:
        (found,) = self.all(name, class_)
        return found

    def __iter__(self) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                yield child
                yield from child


class _Reader(HTMLParser):
    """Fails where a tag is not closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        element = Element(name, {key: value or "" for key, value in attributes})
        assert len(element.attributes) == len(attributes), f"an attribute twice in {name}"
        self.open[-1].children.append(element)
        if name not in _VOID:
            self.open.append(element)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop().name == name, f"</{name}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(text: str) -> Element:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [reader.root]
    return reader.root.one("html")


def cells(table: Element) -> list[list[str]]:
    return [[cell.text for cell in row if cell.name in ("th", "td")] for row in table.one("tbody").all("tr")]


def report(layers: list[Layer], kept: list[Kept] | None = None, verified: bool = True) -> sr.Report:
    """Of a squeeze that never was, with the layers that a test wants to see."""
    before, after = (sum(getattr(layer, f"params_{at}") for layer in layers) for at in ("before", "after"))
    proof = Verification(1.5e-15, 2e-7, (("example", 1e-16), ("batch of 3", 1.5e-15)), 0.1)
    counts = Counts(before + 100, before // 2, before, before // 3), Counts(after + 100, after, after, after)
    return Report(*counts, tuple(layers), tuple(kept or ()), proof if verified else None, 1.0, 0, {}, {})


def bench(*names: str, batches: tuple[int, ...] = (64, 1)) -> Any:
    rows = [
        {"name": name, "batch": batch, "seconds_median": 0.001 * batch / (place + 1) ** (2 if batch > 1 else 1),
         "seconds_low": 0.0001 * batch, "seconds_high": 0.02 * batch, "throughput": 1000 / (place + 1),
         "parameter_bytes": 4_000_000 // (place + 1)}
        for batch in batches for place, name in enumerate(names)
    ]  # fmt: skip
    found = {"device": "cpu", "dtype": "float32", "threads": 1, "batch": batches[0], "rows": rows}
    return SimpleNamespace(to_dict=lambda: found)


@contextlib.contextmanager
def browser(**options: Any) -> Iterator[Any]:
    """A page in a Chromium of its own, with an empty profile; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium")
    quiet = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags = [*quiet.split(), "--disable-component-update", "--disable-sync"]
    with tempfile.TemporaryDirectory() as profile, api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(profile, executable_path=program, args=flags, **options)
        try:
            yield context.new_page()
        finally:
            context.close()
