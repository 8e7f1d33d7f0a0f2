"""What mkdocs does not do by itself, so that the same files read well on a code host and as a site.

README.md is the front page. A link that leaves docs/ brings what it points to: Markdown becomes a page, anything else a
file beside the pages. In the nav, a folder stands for all its pages. SVG pictures go into the page itself, where they
follow the switch between light and dark.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))")
PICTURE = re.compile(r'<img alt="([^"]*)" src="([^":]+\.svg)"[^>]*>')


def on_config(config: MkDocsConfig) -> None:
    config.nav = _filled(config.nav)


def _filled(item: Any) -> Any:
    """The nav, with the pages of a folder where the folder was; its README.md comes first."""
    if isinstance(item, list):
        return [_filled(each) for each in item]
    if isinstance(item, dict):
        return {title: _filled(each) for title, each in item.items()}
    if not item.endswith("/"):
        return item
    pages = sorted((DOCS / item).glob("*.md"), key=lambda page: (page.name != "README.md", page.name))
    return [page.relative_to(DOCS).as_posix() for page in pages]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add every file outside docs/ that is in the nav or that a page links to, and what those link to."""
    waiting = [*_outside(config.nav), *(file.src_uri for file in files.documentation_pages())]
    while waiting:
        uri = waiting.pop()
        source = origin(uri)
        if uri not in files.src_uris:
            level = InclusionLevel.INCLUDED if uri in _outside(config.nav) else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, abs_src_path=str(source), inclusion=level))
        if source.suffix == ".md":
            links = (resolved(link, uri) for link in LINK.findall(source.read_text(encoding="utf-8")))
            waiting += [target for target in links if target is not None and target not in files.src_uris]


def _outside(item: Any) -> Iterator[str]:
    if isinstance(item, list | dict):
        for each in item.values() if isinstance(item, dict) else item:
            yield from _outside(each)
    elif not (DOCS / item).exists() and (ROOT / item).exists():
        yield item


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links between files of the repository become links between those of the site."""
    uri = page.file.src_uri
    if page.parent is None:  # alone under its tab: the column for its neighbours would be empty
        page.meta.setdefault("hide", ["navigation"])

    def on_site(link: re.Match[str]) -> str:
        target = resolved(link[0], uri)
        anchor = urlsplit(link[0]).fragment
        if target is None:
            return link[0]
        return posixpath.relpath(target, posixpath.dirname(uri) or ".") + (f"#{anchor}" if anchor else "")

    return LINK.sub(on_site, markdown)


def on_page_content(content: str, page: Page, **_: Any) -> str:
    def drawn(image: re.Match[str]) -> str:
        file = origin(page.file.src_uri).parent / html.unescape(image[2])
        if not file.is_file():  # mkdocs has said so
            return image[0]
        named = file.read_text(encoding="utf-8").replace("<svg ", f'<svg role="img" aria-label="{image[1]}" ', 1)
        return f'<span class="drawn">{named}</span>'

    return PICTURE.sub(drawn, content)


def origin(uri: str) -> Path:
    """The file of the repository that a page or file of the site is made from."""
    inside = DOCS / uri
    return inside if inside.exists() else ROOT / uri


def resolved(link: str, uri: str) -> str | None:
    """Where a link of this page points, as a path on the site; None if it is to no file of the repository."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return None
    target = Path(posixpath.normpath(posixpath.join(origin(uri).parent.as_posix(), parts.path)))
    if target.is_dir():
        target = target / "README.md"
    if not target.is_file() or ROOT not in target.parents:
        return None
    return target.relative_to(DOCS if DOCS in target.parents else ROOT).as_posix()
