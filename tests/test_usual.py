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

    def __init__(self) -> None:
        self.read: list[tuple[Tensor | None, ...]] = []

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self._saved: tuple[Tensor | None, ...] = tensors

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        self.read.append(self._saved)
        return self._saved


class Both:
    """Forward and backward, with the way back known for one gradient; and what they ask."""

    def __init__(self, in_c: Any) -> None:
        self.x, self.weight = torch.randn(4, 8), torch.randn(8)
        self.dy, self.enabled, self.modes, self._current_level = torch.randn(4, 8), False, 0, -1
        self.way_back, self.called = (self._same, self._run), []
        asks = lambda: self.enabled, lambda: self.modes, self
        self.halves = in_c.Halves(self._with_stats, REMOVED, self, self._unusual, asks)
        self.context = type("Context", (Context,), {"apply": in_c.method(self.halves.backward)})()

    def _with_stats(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.called.append(arguments)
        return self.x + 1, self.x - 1

    def _same(self, x: Tensor, weight: Tensor | None, stats: Tensor, dy: Tensor) -> bool:
        return dy is self.dy

    def _run(self, *arguments: Any) -> str:
        self.called.append(arguments)
        return "gradients"

    def _unusual(self, x: Tensor, weight: Tensor, stats: Tensor, dy: Tensor) -> str:
        saved = self.context.read[-1]
        assert x is saved[0] and weight is saved[1] and stats is saved[2]
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
        both.way_back = way
        with pytest.raises(ValueError, match="on the way"):
            both.context.apply(both.dy)
    del both.context._saved
    with pytest.raises(AttributeError, match="_saved"):
        both.context.apply(both.dy)
    asks = lambda: False, lambda: 0, both
    with pytest.raises(ValueError, match="on the way"):
        in_c.Halves(fails, REMOVED, both, fails, asks).forward(Context(), both.x, None, None)
    with pytest.raises(TypeError, match="takes 4"):
        both.halves.forward(Context())
    with pytest.raises(TypeError, match="takes 2"):
        both.context.apply()
    with pytest.raises(TypeError):
        in_c.Halves(fails, list(REMOVED), both, fails, asks)
    assert not both.called


@pytest.mark.parametrize("dy", ["seen", "other"])
def test_what_was_saved_is_unpacked_once(dy: str, both: Both) -> None:
    both.context.read.clear()
    both.context.apply(both.dy if dy == "seen" else torch.randn(4, 8))
    assert len(both.context.read) == 1


def test_what_was_saved_must_be_three(both: Both) -> None:
    both.context._saved = ()
    with pytest.raises(RuntimeError, match="three tensors"):
        both.context.apply(both.dy)


def test_objects_that_never_began(in_c: Any) -> None:
    for broken in (in_c.Halves.__new__(in_c.Halves).forward, in_c.Halves.__new__(in_c.Halves).backward):
        with pytest.raises(TypeError):
            broken(1, 2, 3, 4)
    with pytest.raises((TypeError, RuntimeError)):
        in_c.Launch.__new__(in_c.Launch)(1, 2)


def test_autograd_keeps_nothing(both: Both) -> None:
    other = torch.randn(4, 8)
    counted = both.x, both.weight, both.dy, other, REMOVED, both.way_back, both.context.saved_tensors[2], both.context

    def run() -> None:
        both.halves.forward(Context(), both.x, both.weight, None)
        both.context.apply(both.dy), both.context.apply(other)
        both.called.clear(), both.context.read.clear()

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


def test_a_norm_without_statistics_is_handed_on(asked: Asked) -> None:
    del asked.norm["_buffers"]["statistics"], asked.norm["_known"]
    assert asked() == "normalize"


def test_what_another_thread_exchanges_stays_until_the_end(asked: Asked) -> None:
    def same(x: Tensor, weight: Any, bias: Any) -> bool:
        asked.norm["_parameters"] = {}  # the only one who held them
        asked.norm["_numbers"] = None
        return True

    asked.norm["_parameters"] = {"weight": torch.ones(8), "bias": torch.ones(8)}
    _, tracked, (_, differentiable) = asked.way("this", asked.x)
    asked.globals["_seen"] = {(8, False): ((same, tracked, (None, differentiable)),)}
    assert asked() == "this, differentiable"
    assert torch.equal(asked.called[0][2], torch.ones(8)) and torch.equal(asked.called[0][3], torch.ones(8))


def test_a_level_that_is_no_number_is_an_error(asked: Asked) -> None:
    asked._current_level = "none"  # type: ignore[assignment]
    with pytest.raises(TypeError):
        asked()


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
