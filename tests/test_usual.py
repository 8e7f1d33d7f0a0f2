"""The usual call in C, `usual.c`: what it asks and does, and that all else is handed on to Python."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

# ------------------------------------------------------------------------------------------------------------- autograd

REMOVED = (0.1, 0.2, 0.3, 0.4, 0.5)


class Context:
    """Autograd's."""

    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class Both:
    """Forward and backward, with the way back known for one gradient; and what they ask."""

    def __init__(self, in_c: Any) -> None:
        self.x, self.weight = torch.randn(4, 8), torch.randn(8)
        self.dy, self.enabled, self.modes, self._current_level = torch.randn(4, 8), False, 0, -1
        self.known, self.called = (self._same, self._run), []
        asks = lambda: self.enabled, lambda: self.modes, self
        self.halves = in_c.Halves(self._with_stats, REMOVED, self, self._otherwise, asks)
        self.context = type("Context", (Context,), {"apply": in_c.method(self.halves.backward)})()

    def _with_stats(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.called.append(arguments)
        return self.x + 1, self.x - 1

    def _same(self, x: Tensor, weight: Tensor | None, stats: Tensor, dy: Tensor) -> bool:
        return dy is self.dy

    def _run(self, *arguments: Any) -> str:
        self.called.append(arguments)
        return "gradients"

    def _otherwise(self, ctx: Any, dy: Tensor) -> str:
        assert ctx is self.context
        self.called.append((dy,))
        return "the long way"


@pytest.fixture
def both(in_c: Any) -> Both:
    both = Both(in_c)
    y = both.halves.forward(both.context, both.x, both.weight, None)
    ((*given, removed),) = both.called
    assert torch.equal(y, both.x + 1) and removed is REMOVED
    assert given[0] is both.x and given[1] is both.weight and given[2] is None
    saved = both.context.saved_tensors
    assert saved[0] is both.x and saved[1] is both.weight and torch.equal(saved[2], both.x - 1)
    both.called.clear()
    return both


def test_the_usual_way_back(both: Both) -> None:
    assert both.context.apply(both.dy) == "gradients"
    ((x, dy, weight, stats, inverse),) = both.called
    assert x is both.x and dy is both.dy and weight is both.weight
    assert stats is both.context.saved_tensors[2] and inverse == (0.5,)


@pytest.mark.parametrize("what", ["other tensors", "create_graph", "a mode", "forward gradients"])
def test_an_unusual_way_back(what: str, both: Both) -> None:
    dy = torch.randn(4, 8) if what == "other tensors" else both.dy
    both.enabled, both.modes = what == "create_graph", int(what == "a mode")
    both._current_level = 0 if what == "forward gradients" else -1
    assert both.context.apply(dy) == "the long way"
    assert len(both.called) == 1 and both.called[0][0] is dy


def test_errors_of_autograd_are_handed_on(in_c: Any, both: Both) -> None:
    def fails(*arguments: Any) -> Any:
        raise ValueError("on the way")

    for way in ((fails, both._run), (both._same, fails)):
        both.known = way
        with pytest.raises(ValueError, match="on the way"):
            both.context.apply(both.dy)
    del both.context.saved_tensors
    with pytest.raises(AttributeError, match="saved_tensors"):
        both.context.apply(both.dy)
    asks = lambda: False, lambda: 0, both
    with pytest.raises(ValueError, match="on the way"):
        in_c.Halves(fails, REMOVED, both, fails, asks).forward(Context(), both.x, None, None)
    with pytest.raises(TypeError, match="4 arguments"):
        both.halves.forward(Context())
    with pytest.raises(TypeError, match="2 arguments"):
        both.context.apply()
    with pytest.raises(TypeError):
        in_c.Halves(fails, list(REMOVED), both, fails, asks)
    assert not both.called


def test_autograd_keeps_nothing(both: Both) -> None:
    other = torch.randn(4, 8)
    counted = both.x, both.weight, both.dy, other, REMOVED, both.known, both.context.saved_tensors[2], both.context

    def run() -> None:
        both.halves.forward(Context(), both.x, both.weight, None)
        both.context.apply(both.dy), both.context.apply(other)
        both.called.clear()

    run()
    before = [sys.getrefcount(each) for each in counted]
    for _ in range(100):
        run()
    assert [sys.getrefcount(each) for each in counted] == before


def test_halves_in_a_circle_are_collected(in_c: Any) -> None:
    both = Both(in_c)
    gone = weakref.ref(both)
    del both
    gc.collect()
    assert gone() is None


# -------------------------------------------------------------------------------------------------------- shortest.py


class Asked:
    """Globals as those of shortest.py and a norm, with one kind of tensors seen; and what was called."""

    def __init__(self, in_c: Any) -> None:
        self.x, self.weight, self.fails = torch.randn(4, 8), torch.randn(8), ""
        self.enabled, self.modes, self._current_level, self.called = True, 0, -1, []
        self.globals: dict[str, Any] = {
            "_seen": {(8, False): (self.way("other", None), self.way("this", self.x))},
            "_normalize": self._called("normalize"),
            "count_modes": lambda: self.modes,
            "is_grad_enabled": lambda: self.enabled,
            "forward_ad": self,
        }
        self.norm: dict[str, Any] = {
            "_parameters": {"weight": self.weight, "bias": None},
            "_buffers": {"statistics": self.weight},
            "_known": self.weight,
            "_numbers": REMOVED,
            "_kept": 8,
        }
        self.normalize = in_c.normalize_with(self.globals)

    def way(self, name: str, like: Any, tracked: bool = True, plain: bool = True) -> tuple[Any, ...]:
        def same(x: Tensor, weight: Any, bias: Any) -> bool:
            if self.fails == "same":
                raise ValueError("on the way")
            return x is like and weight is self.weight and bias is None

        differentiable = {REMOVED: self._called(f"{name}, differentiable")}
        return same, tracked, (self._called(f"{name}, plain") if plain else None, differentiable)

    def _called(self, name: str) -> Any:
        def call(*arguments: Any) -> str:
            if self.fails == name:
                raise ValueError("on the way")
            self.called.append((name, *arguments))
            return name

        return call

    def __call__(self, x: Any = None, image: bool = False) -> Any:
        return self.normalize(self.x if x is None else x, self.norm, image)


@pytest.fixture
def asked(in_c: Any) -> Asked:
    return Asked(in_c)


def test_the_way_that_was_seen(asked: Asked) -> None:
    assert asked() == "this, differentiable"
    ((_, *given),) = asked.called
    assert given[0] is asked.x and given[1] is asked.weight and given[2:] == [None]
    asked.enabled = False
    assert asked() == "this, plain" and asked.called[-1][-1] is REMOVED
    asked.enabled, asked.globals["_seen"] = True, {(8, False): (asked.way("new", asked.x, tracked=False),)}
    assert asked() == "new, plain"
    asked.globals["_seen"] = {(8, False): (asked.way("no kernel", asked.x, tracked=False, plain=False),)}
    assert asked() is None


UNUSUAL = "another tensor|an image|nested|no weight|others' statistics|a mode|forward gradients|far behind".split("|")


@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_unusual_is_handed_on(what: str, asked: Asked) -> None:
    x = torch.randn(4, 8) if what == "another tensor" else SimpleNamespace(is_nested=True) if what == "nested" else None
    if what == "no weight":  # but a parametrized one
        del asked.norm["_parameters"]["weight"]
    if what == "others' statistics":
        asked.norm["_buffers"]["statistics"] = asked.x
    if what == "far behind":
        asked.globals["_seen"] = {(8, False): (*[asked.way("other", None)] * 4, asked.way("this", asked.x))}
    asked.modes, asked._current_level = int(what == "a mode"), 0 if what == "forward gradients" else -1
    assert asked(x, what == "an image") == "normalize"
    ((_, *given),) = asked.called
    assert given == [asked.x if x is None else x, asked.norm, what == "an image"]


@pytest.mark.parametrize("where", ["same", "this, differentiable", "normalize"])
def test_errors_on_the_shortest_way(where: str, asked: Asked) -> None:
    asked.fails, asked.modes = where, int(where == "normalize")
    with pytest.raises(ValueError, match="on the way"):
        asked()
    with pytest.raises(AttributeError, match="is_nested"):
        asked("not a tensor")
    asked.norm["_numbers"], asked.fails, asked.modes = (1.0,), "", 0
    with pytest.raises(KeyError):
        asked()


def test_other_arguments_of_the_shortest_way(in_c: Any, asked: Asked) -> None:
    for wrong in ((), (asked.x, [], False)):
        with pytest.raises(TypeError, match="takes 3"):
            asked.normalize(*wrong)
    with pytest.raises(TypeError, match="takes a dict"):
        in_c.normalize_with([])
    with pytest.raises(TypeError, match="misses _seen"):
        in_c.normalize_with({})


def test_the_shortest_way_keeps_nothing(asked: Asked) -> None:
    other = torch.randn(4, 8)
    counted = asked.x, other, REMOVED, asked.norm, asked.weight, *asked.globals["_seen"][8, False]

    def run() -> None:
        for asked.enabled in (False, True):
            asked(), asked(other), asked(image=True)
        asked.modes = 1
        asked()
        asked.modes = 0
        asked.called.clear()

    run()
    before = [sys.getrefcount(each) for each in counted]
    for _ in range(100):
        run()
    assert [sys.getrefcount(each) for each in counted] == before
