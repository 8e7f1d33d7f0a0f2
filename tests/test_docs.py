"""Examples in docstrings say what happens, and the pages made from docstrings say what those say."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from squeeze_release.rules import RULES, Rule

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.mark.parametrize("name", ["squeeze_release.squeeze", "squeeze_release.store"])
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


@pytest.fixture(scope="module")
def rule_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rule_pages", DOCS / "rule_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_of_rules_are_those_of_the_docstrings(rule_pages: ModuleType) -> None:
    committed = {path.name: path.read_text() for path in (DOCS / "rules").glob("*.md")}
    assert committed == rule_pages.pages(), "run `make docs`"


def test_every_rule_is_on_a_page_with_its_ops(rule_pages: ModuleType) -> None:
    written = "".join(rule_pages.pages().values())
    for op, rule in RULES.items():
        namespace, name, overload = op.name().partition("::")[0], op._opname, op._overloadname
        names = [f"{name}", f"{name}.{overload}", f"{namespace}::{name}"]
        assert any(f"`{each}`" in written for each in names) and f"## {type(rule).__name__}\n" in written, op


def test_every_rule_says_when_it_is_exact_and_what_it_keeps() -> None:
    for rule in RULES.values():
        said = "".join(base.__doc__ or "" for base in type(rule).__mro__ if base is not Rule)
        assert "Exact: " in said and "Keeps: " in said, type(rule).__name__


def test_the_architecture_page_names_every_file() -> None:
    page = (DOCS / "architecture.md").read_text()
    files = [path.name for path in (DOCS.parent / "src/squeeze_release").rglob("*.py") if "modules" not in path.parts]
    assert [name for name in files if name != "__init__.py" and f"`{name}`" not in page] == []
