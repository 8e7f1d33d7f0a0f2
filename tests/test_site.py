"""The site builds without a warning, holds every page, and fetches nothing from anywhere."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest

import squeeze_release as sr

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FETCHED = {"link": "href", "use": "href"} | dict.fromkeys("script img iframe source video".split(), "src")


class Page(html.parser.HTMLParser):
    """What a page links to, what it fetches, and its headings."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if FETCHED.get(tag, "") in given and given.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(given[FETCHED[tag]])
        self.ids.add(given.get("id", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    out = tmp_path_factory.mktemp("site")
    # Not --quiet, which would hide warnings from --strict too.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    told = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # the theme's own news
    done = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "WARNING" not in done.stdout + done.stderr, done.stderr
    return out


def test_every_page_is_on_the_site_and_in_its_nav(site: Path) -> None:
    nav = {urlsplit(link).path for link in Page(site / "index.html").links}
    for page in DOCS.rglob("*.md"):
        place = page.relative_to(DOCS).with_suffix(".html").as_posix().replace("README.html", "index.html")
        assert (site / place).is_file() and place in nav, f"{place} needs a line in mkdocs.yml"
    assert {"index.html", "CHANGELOG.html", "CONTRIBUTING.html"} <= nav


def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    for file in site.rglob("*.html"):
        for target in Page(file).fetched:
            assert not urlsplit(target).netloc, (file.name, target)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//|@import", style.read_text(encoding="utf-8")), style.name


def test_links_lead_somewhere(site: Path) -> None:
    """mkdocs looks at links between its own pages; these are all, as a browser follows them."""
    pages = {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), (file.name, link)
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].ids, (file.name, link)


def test_the_api_page_has_every_public_name(site: Path) -> None:
    ids = Page(site / "api.html").ids
    names = {name for name in sr.__all__ if name != "prune"}
    public = [getattr(sr, name) for name in names] + [getattr(sr.prune, name) for name in sr.prune.__all__]
    missing = [thing.__name__ for thing in public if f"{thing.__module__}.{thing.__qualname__}" not in ids]
    assert missing == []


@pytest.mark.parametrize("picture", sorted((DOCS / "images").glob("*.svg")), ids=lambda picture: picture.stem)
def test_pictures_share_one_style_and_are_drawn_into_the_page(picture: Path, site: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    styles = {_style(other) for other in (DOCS / "images").glob("*.svg")}
    assert root.get("class") == "picture" and root.get("viewBox") and len(styles) == 1
    assert not re.search(r"(fill|stroke)=\"#", text), "colours are those of the style, which knows light and dark"
    shown = [page for page in DOCS.rglob("*.md") if f"images/{picture.name})" in page.read_text(encoding="utf-8")]
    assert shown, "no page shows it"
    for page in shown:
        built = (site / page.relative_to(DOCS)).with_suffix(".html").read_text(encoding="utf-8")
        assert f"images/{picture.name}" not in built and 'class="picture"' in built


def test_pictures_have_the_colours_of_the_report_page_in_light_and_dark() -> None:
    """In the file they follow the browser, on the site its switch."""
    drawn = _colours(next((DOCS / "images").glob("*.svg")), r"\.picture \{")
    assert len(drawn) == 2 and drawn == _colours(DOCS / "theme/site.css", r"\.picture \{")
    for mine, page in zip(drawn, _colours(ROOT / "src/squeeze_release/page/style.css", r":root \{"), strict=True):
        del mine["noise"]  # which the page has no use for
        assert mine.items() <= page.items()


def _colours(file: Path, start: str) -> list[dict[str, str]]:
    blocks = re.findall(start + r"([^}]*--paper[^}]*)\}", file.read_text(encoding="utf-8"))
    return [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in blocks]


def _style(picture: Path) -> str:
    found = re.search(r"<style>.*?</style>", picture.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[0]
