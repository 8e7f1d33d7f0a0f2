"""HTML and SVG as text. Whatever is not `Markup` is escaped, so that no name or command can become part of the page."""

from __future__ import annotations

import html
import re

_BREAKS = re.compile(r"(?<=\.)(?=.)|(?<=[a-z])(?=[A-Z])")


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element. `class_` is written class, `stroke_width` stroke-width; attributes and children of None are left out.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    given = "".join(f' {_name(key)}="{escaped(value)}"' for key, value in attributes.items() if value is not None)
    return Markup(f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: object) -> Markup:
    """One after the other."""
    return Markup("".join(escaped(child) for child in children if child is not None))


def escaped(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def breakable(name: str) -> Markup:
    """A long name, which may break after dots and before capitals."""
    return Markup("<wbr>".join(escaped(part) for part in _BREAKS.split(name)))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
