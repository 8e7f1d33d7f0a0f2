"""Write docs/rules: one page a file of rules, made from its docstrings. Run as `make docs`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType

from squeeze_release import rules
from squeeze_release.rules import Rule

HERE = Path(__file__).resolve().parent / "rules"
SOURCES = Path(rules.__file__).parent
ITEM = re.compile(r"(Constant|Known|Need|Absorb|Exact|Keeps|Depthwise|Grouped|Grouped queries)( \([^)]*\))?: ")
FOOT = "*Made from the docstrings of `{}` by `make docs`; edit those.*"

INTRODUCTION = """# Rules

There is one rule for each operation and none for any network. A page below holds one family of them, file by file of
`src/squeeze_release/rules`. Each rule states its algebra, and under these heads

- **Constant**: which outputs do not depend on the input;
- **Known**: which are known up to functions of the position that all channels share, so that others can carry them;
- **Need**: which inputs the living outputs need;
- **Absorb**: what becomes of the parameters when channels go;
- **Exact**: why, or where, the result is the same function;
- **Keeps**: where it refuses, and what stays then. The report gives the reason in words, with the place.

An operation without a rule keeps everything it touches. What an operation computes with numbers is computed by that
operation itself, in float64.

| page | about | operations |
|---|---|---|
"""


def main() -> None:
    HERE.mkdir(exist_ok=True)
    written = pages()
    for old in set(HERE.glob("*.md")) - {HERE / name for name in written}:
        old.unlink()
    for name, text in written.items():
        (HERE / name).write_text(text)


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    families = {path.stem: _module(path.stem) for path in sorted(SOURCES.glob("*.py")) if path.stem != "__init__"}
    result = {_file(name): _page(module) for name, module in families.items()}
    rows = [
        f"| [{name}]({_file(name)}) | {_headline(module)} | {_names(module)} |" for name, module in families.items()
    ]
    foot = FOOT.format("src/squeeze_release/rules")
    return {"README.md": "\n".join([INTRODUCTION + rows[0], *rows[1:], "", foot, ""]), **result}


def _file(name: str) -> str:
    """On a site index.md would be the front page of the folder, which is README.md."""
    return "indexing.md" if name == "index" else f"{name}.md"


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{rules.__name__}.{name}")


def _page(module: ModuleType) -> str:
    name = module.__name__.rpartition(".")[2]
    parts = [f"# {name}", _laid_out(module)]
    classes = rule_classes(module)
    ops = registered(module)
    for cls in classes:
        parts += [f"## {cls.__name__}", _covers(cls, ops.get(cls.__name__, [])), _laid_out(cls)]
    for thing in () if classes else _helpers(module):  # a file that rules of other files call
        parts += [f"## {thing.__name__}", _laid_out(thing)]
    return "\n\n".join([*parts, FOOT.format(f"src/squeeze_release/rules/{name}.py")]) + "\n"


def rule_classes(module: ModuleType) -> list[type[Rule]]:
    """The rules of a file, in its order."""
    return [thing for thing in _own(module) if isinstance(thing, type) and issubclass(thing, Rule)]


def _helpers(module: ModuleType) -> list[object]:
    return [thing for thing in _own(module) if inspect.getdoc(thing) and not thing.__name__.startswith("_")]  # type: ignore[attr-defined]


def _own(module: ModuleType) -> list[object]:
    things = [thing for thing in vars(module).values() if inspect.isclass(thing) or inspect.isfunction(thing)]
    return [thing for thing in dict.fromkeys(things) if thing.__module__ == module.__name__]


def registered(module: ModuleType) -> dict[str, list[str]]:
    """Class -> the ops it is registered for, as the source names them: which overloads there are is torch's matter."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                if _is_rule(decorator):
                    found[node.name] = _targets(decorator, module)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_rule(node.value.func):
            found[ast.unparse(node.value.args[0])] = _targets(node.value.func, module)  # rule(*MOVES)(Move)
    return found


def _is_rule(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "rule"


def _targets(call: ast.expr, module: ModuleType) -> list[str]:
    assert isinstance(call, ast.Call)
    names: list[str] = []
    for argument in call.args:
        if isinstance(argument, ast.Starred):
            names += getattr(module, ast.unparse(argument.value))
        else:
            names.append(ast.literal_eval(argument))
    return list(dict.fromkeys(names))


def _covers(cls: type[Rule], ops: list[str]) -> str:
    bases = [base.__name__ for base in cls.__bases__ if base not in (Rule, object)]
    extends = f"As [{bases[0]}]({_place(cls.__bases__[0], cls)}), and what is said here. " if bases else ""
    if not ops:
        return "Every op that has no rule." if cls is Rule else f"{extends}What other rules share."
    text = f"{extends}Ops: {', '.join(f'`{op}`' for op in ops)}"
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _place(base: type, seen_from: type) -> str:
    page = _file(base.__module__.rpartition(".")[2]) if base.__module__ != seen_from.__module__ else ""
    return f"{page}#{base.__name__.lower()}"


def _laid_out(thing: object) -> str:
    """A docstring as Markdown: its heads become a list."""
    lines, result = (inspect.getdoc(thing) or "").splitlines(), []
    listed = False
    for line in lines:
        head = ITEM.match(line)
        if head:
            if result and result[-1] and not listed:
                result.append("")
            line = f"- **{head.group(1)}**{head.group(2) or ''}: {line[head.end() :]}"
            listed = True
        elif listed and line:
            line = f"  {line}"
        listed = listed and bool(line)
        result.append(line)
    return "\n".join(result)


def _headline(module: ModuleType) -> str:
    return (inspect.getdoc(module) or "").splitlines()[0].rstrip(".")


def _names(module: ModuleType) -> str:
    ops = [op for names in registered(module).values() for op in names]
    shown = ", ".join(f"`{op}`" for op in ops[:6])
    return f"{shown} and {len(ops) - 6} more" if len(ops) > 6 else shown or "none of its own"


if __name__ == "__main__":
    main()
