"""`normalize` of shortest.py in C++: what was seen is normalized, and all else is handed on to Python."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from plain_kernels import Plain
from test_fused import near
from test_fused_where import Watches
from test_usual import norm
from torch import Tensor
from torch.autograd import forward_ad

from squeeze_release import CompensatedLayerNorm
from squeeze_release.modules.kernels import fused
from squeeze_release.modules.kernels.shortest import Seen


class Asked:
    """`normalize` as in shortest.py, where the CPU passes for a GPU; and what was handed on."""

    def __init__(self, in_cpp: Any, made: CompensatedLayerNorm, image: bool = False) -> None:
        self.in_cpp, self.norm, self.image, self.handed_on = in_cpp, made, image, []
        self.globals: dict[str, Any] = {"_seen": {}, "_normalize": self._normalize}
        self.normalize = in_cpp.normalize_with(self.globals)

    def _normalize(self, *arguments: Any) -> None:
        self.handed_on.append(arguments)

    def see(self, x: Tensor) -> Asked:
        weight, bias = self.norm.weight, self.norm.bias
        tracked = any(each is not None and each.requires_grad for each in (x, weight, bias))
        seen = Seen(self.in_cpp.Likes(x, weight, bias), tracked, fused.kernels(x, weight, bias, self.image))
        assert seen.kernels.plain is not None
        kind = self.norm._kept, self.image
        self.globals["_seen"][kind] = (seen, *self.globals["_seen"].get(kind, ()))
        return self

    def __call__(self, x: Any) -> Any:
        return self.normalize(x, self.norm.__dict__, self.image)


@pytest.fixture
def asked(in_cpp: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fused, "_ready", lambda device: True)
    return lambda made, image=False: Asked(in_cpp, made, image)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("how", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_what_was_seen_is_normalized(gradients: bool, how: dict[str, bool], asked: Any, plain: Plain) -> None:
    ask, x = asked(norm(**how)), torch.randn(4, 8, requires_grad=True)
    ask.see(torch.randn(7, 8)).see(x)
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            y = ask(x)
            near(y, copy.deepcopy(ask.norm).double()(x.double()))
            assert y.requires_grad == gradients
    assert plain.by_driver and not ask.handed_on


@pytest.mark.parametrize("gradients", [False, True])
def test_images_are_normalized(gradients: bool, asked: Any) -> None:
    ask, x = asked(norm(channel_dim=1), image=True), torch.randn(2, 8, 3, 5)
    ask.see(x)
    with torch.set_grad_enabled(gradients):
        for _ in range(2):
            near(ask(x), copy.deepcopy(ask.norm).double()(x.double()))
    assert not ask.handed_on


UNUSUAL = (
    *(
        "another tensor",
        "an image",
        "nested",
        "no tensor",
        "no weight",
        "others' statistics",
        "no statistics",
        "a mode",
    ),
    *("forward gradients", "far behind"),
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in forward AD
@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_unusual_is_handed_on(what: str, asked: Any) -> None:
    ask, x = asked(norm()), torch.randn(4, 8)
    ask.see(x)
    assert ask(x) is not None and not ask.handed_on
    nested = torch.nested.nested_tensor([x[0]], layout=torch.jagged)
    given = {"another tensor": torch.randn(5, 8), "nested": nested, "no tensor": "x"}.get(what, x)
    parts = ask.norm.__dict__
    if what == "an image":
        ask.image = True
    elif what == "no weight":  # but a parametrized one
        del parts["_parameters"]["weight"]
    elif what == "others' statistics":
        parts["_buffers"]["statistics"] = x
    elif what == "no statistics":
        del parts["_buffers"]["statistics"], parts["_known"]
    elif what == "far behind":
        for count in (10, 11, 12, 13):
            ask.see(torch.randn(count, 8))
    if what == "a mode":
        with Watches():
            assert ask(given) is None
    elif what == "forward gradients":
        with forward_ad.dual_level():
            assert ask(given) is None
    else:
        assert ask(given) is None
    ((one, other, image),) = ask.handed_on
    assert one is given and other is parts and image is ask.image


def test_where_there_is_no_kernel(asked: Any, in_cpp: Any) -> None:
    ask, x = asked(norm()), torch.randn(4, 8)
    ask.globals["_seen"] = {(8, False): (Seen(in_cpp.Likes(x, ask.norm.weight, ask.norm.bias), True, (None, None)),)}
    assert ask(x) is None and not ask.handed_on
    ask.globals["_seen"] = {(8, False): (Seen(lambda *tensors: True, True, (None, None)),)}  # asked by Python
    assert ask(x) is None and len(ask.handed_on) == 1


def test_errors_on_the_shortest_way(asked: Any, in_cpp: Any) -> None:
    ask, x = asked(norm()), torch.randn(4, 8)

    def fails(*arguments: Any) -> Any:
        raise ValueError("on the way")

    same = in_cpp.Likes(x, ask.norm.weight, ask.norm.bias)
    for kernels, error in (((None, {ask.norm._numbers: fails}), ValueError), ((None, {}), KeyError)):
        ask.globals["_seen"] = {(8, False): (Seen(same, True, kernels),)}
        with pytest.raises(error):
            ask(x)
    ask.globals["_seen"], ask.globals["_normalize"] = {}, fails
    with pytest.raises(ValueError, match="on the way"):
        ask(x)
    for wrong in ((), (x, [], False)):
        with pytest.raises(TypeError, match="takes 3"):
            ask.normalize(*wrong)
    with pytest.raises(TypeError):
        in_cpp.normalize_with([])
    with pytest.raises(TypeError, match="misses _seen"):
        in_cpp.normalize_with({})


def test_the_shortest_way_keeps_nothing(asked: Any) -> None:
    ask, x, other = asked(norm()), torch.randn(4, 8), torch.randn(5, 8)
    ask.see(x)
    (seen,) = ask.globals["_seen"][8, False]
    counted = x, other, ask.norm._numbers, ask.norm.weight, ask.norm.__dict__, seen, seen.kernels

    def all_of_it() -> None:
        for enabled in (False, True):
            with torch.set_grad_enabled(enabled):
                ask(x), ask(other)
        ask.handed_on.clear()

    all_of_it()
    before = [sys.getrefcount(each) for each in counted]
    for _ in range(100):
        all_of_it()
    assert [sys.getrefcount(each) for each in counted] == before
