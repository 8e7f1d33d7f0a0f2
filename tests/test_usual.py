"""The usual call in C++, `usual.cpp`: what it asks and does, and that all else is handed on to Python."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from plain_kernels import Plain
from test_fused import near, run
from test_fused_where import Other, Watches
from torch import Tensor, nn
from torch.autograd import forward_ad

from squeeze_release import CompensatedLayerNorm
from squeeze_release.modules.kernels import fused, rows, shortest, usual
from squeeze_release.modules.kernels.inputs import like


def norm(kept: int = 8, removed: int = 3, **how: Any) -> CompensatedLayerNorm:
    made = CompensatedLayerNorm(kept, **how)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    made.merge(torch.randn(removed) + 2)
    return made


# ------------------------------------------------------------------------------------------------------- like or unlike


@pytest.mark.parametrize("channels", [None, -1, 1])
@pytest.mark.parametrize("how", ["C++", "torch"])
def test_what_is_like_a_tensor(how: str, channels: int | None, in_cpp: Any) -> None:
    x, weight = torch.randn(4, 8), nn.Parameter(torch.randn(8))
    same = like(x, weight, channels=channels, in_cpp=in_cpp if how == "C++" else None)
    assert same is not None and same(x, weight) and same(torch.zeros(4, 8), nn.Parameter(torch.zeros(8)))
    for open_to_some in (torch.randn(5, 8), torch.randn(8, 4).T, torch.randn(0, 8)):
        assert same(open_to_some, weight) == (channels is not None)
    others = {
        "width": torch.randn(4, 9), "rank": torch.randn(1, 4, 8), "fewer": torch.randn(8), "dtype": x.double(),
        "gradients": x.clone().requires_grad_(),
        "class": x.as_subclass(Other), "device": x.to("meta"), "negated": torch._neg_view(x), "sparse": x.to_sparse(),
        "zeros": torch._efficientzerotensor(4, 8), "nothing": None,
    }  # fmt: skip
    assert not [what for what, other in others.items() if same(other, weight)]
    assert not same(x, None) and not same(x, torch.zeros(8))
    torch.vmap(lambda row: pytest.fail("like a batch") if same(row, weight) else row)(torch.randn(2, 4, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert not same(x, weight)


def test_none_is_like_none_alone(in_cpp: Any) -> None:
    same = like(torch.randn(2), None, in_cpp=in_cpp)
    assert same is not None and same(torch.randn(2), None) and not same(torch.randn(2), torch.randn(2))


def test_nested_tensors_are_like_none(in_cpp: Any) -> None:
    x = torch.randn(2, 8)
    nested = torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)
    assert not in_cpp.Likes(x)(nested)


def test_only_tensors_are_asked_about(in_cpp: Any) -> None:
    for wrong in ((1,), ("x", torch.randn(2))):
        with pytest.raises(TypeError):
            in_cpp.Likes(*wrong)
    with pytest.raises(IndexError, match="a dimension"):
        in_cpp.Likes(torch.randn(2), channels=1)
    same = in_cpp.Likes(torch.randn(2))
    assert not same("x")
    with pytest.raises(TypeError):
        same()


def test_a_kernel_for_cpus_is_somewhere_and_has_a_width(in_cpp: Any) -> None:
    for wrong in ((0, 8, False, print), (1, 0, False, print)):
        with pytest.raises(TypeError, match="a function and a width"):
            in_cpp.Native(*wrong)


# ------------------------------------------------------------------------------------------------------------- autograd


def test_backward_is_told_once_and_then_needs_no_python(plain: Plain) -> None:
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    for times in range(3):
        y = run(made, x)
        assert "CompensatedLayerNorm" in y.grad_fn.name()
        y.sum().backward()
        assert plain.by_triton == 2 and plain.by_driver == 2 * times


@pytest.mark.parametrize("count", [4, 600])  # one kernel back, or two
@pytest.mark.parametrize("how", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_gradients_equal_float64(count: int, how: dict[str, bool], plain: Plain) -> None:
    made = norm(**how)
    exact = copy.deepcopy(made).double()
    for _ in range(2):
        x, dy = torch.randn(count, 8, requires_grad=True), torch.randn(count, 8)
        wide = x.detach().double().requires_grad_()
        got = torch.autograd.grad(run(made, x), (x, *made.parameters()), dy)
        want = torch.autograd.grad(exact(wide), (wide, *exact.parameters()), dy.double())
        for one, other in zip(got, want, strict=True):
            near(one, other, 2e-6)
    assert plain.by_driver


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "weight and bias"])
@pytest.mark.parametrize("count", [4, 600])
def test_frozen_tensors_get_no_gradients(frozen: str, count: int, plain: Plain) -> None:
    made, x = norm(), torch.randn(count, 8)
    given = {"x": x, "weight": made.weight, "bias": made.bias}
    for name, tensor in given.items():
        tensor.requires_grad_(name not in frozen.split(" and "))
    for _ in range(2):
        run(made, x).square().sum().backward()
    assert {name for name, tensor in given.items() if tensor.grad is None} == set(frozen.split(" and "))
    assert plain.by_driver


def test_autograd_itself_is_as_ever(plain: Plain) -> None:
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        y = run(made, x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.sum().backward()
        y, seen = run(made, x), Mock(return_value=None)
        y.grad_fn.register_hook(seen)
        y.sum().backward()
        assert [len(each) for each in seen.call_args.args] == [3, 1] and [
            len(edge) for edge in y.grad_fn.next_functions
        ] == [2, 2, 2]
    twice = x * 1
    y = run(made, twice)
    twice.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert not run(made, x.detach().requires_grad_()).detach().requires_grad


def test_anomalies_are_found(plain: Plain) -> None:
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    for _ in range(2):
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("ignore")  # where it was called, which is torch's to say
            y = run(made, x)
            with pytest.raises(RuntimeError, match=r"CompensatedLayerNorm.*nan"):
                y.backward(torch.full_like(y, torch.nan))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in forward AD
def test_who_watches_backward_sees_plain_ops(plain: Plain) -> None:
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    want = [torch.autograd.grad(run(made, x).square().sum(), x)[0] for _ in range(2)][-1]
    y, before = run(made, x).square().sum(), (plain.by_triton, plain.by_driver)
    with Watches():
        near(torch.autograd.grad(y, x, retain_graph=True)[0], want.double())
    with forward_ad.dual_level():
        near(torch.autograd.grad(y, x, retain_graph=True)[0], want.double())
    near(torch.autograd.grad(y, x, create_graph=True)[0], want.double())
    assert (plain.by_triton, plain.by_driver) == before


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_a_compiled_backward(plain: Plain) -> None:
    """torch's compiled autograd traces nodes of C++ too, or calls them as they are."""
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    want = [torch.autograd.grad(run(made, x).square().sum(), x)[0] for _ in range(2)][-1]
    y = run(made, x).square().sum()
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        got = torch.autograd.grad(y, x)[0]
    near(got, want.double())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_a_compiler_that_copies_what_was_saved(plain: Plain) -> None:
    """What the node has in common with others is no data: a copy of it must not be read."""
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    y = run(made, x).square().sum()
    torch._dynamo.reset()  # what was compiled for another test

    def copies(graph: Any) -> Any:
        return lambda inputs, *others: graph([each.clone() for each in inputs], *others)

    with torch._dynamo.compiled_autograd._enable(copies), pytest.raises(RuntimeError, match="was copied"):
        torch.autograd.grad(y, x)


def test_gradients_of_several_layouts_in_turn(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, asked = norm(), torch.randn(4, 8, requires_grad=True), []
    ask = rows.Rows.backward
    monkeypatch.setattr(rows.Rows, "backward", lambda *given: asked.append(given) or ask(*given))
    layouts = torch.randn(4, 8), torch.randn(1, 8).expand(4, 8), torch.randn(8, 4).T
    exact, wide = copy.deepcopy(made).double(), x.detach().double().requires_grad_()
    for _ in range(3):
        for dy in layouts:
            (want,) = torch.autograd.grad(exact(wide), wide, dy.double())
            near(torch.autograd.grad(run(made, x), x, dy)[0], want)
    assert len(asked) == len(layouts)


def test_saved_tensors_may_be_elsewhere_meanwhile(plain: Plain) -> None:
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    want = torch.autograd.grad(run(made, x).square().sum(), x)[0]
    packed: list[Tensor] = []

    def pack(saved: Tensor) -> int:
        packed.append(saved)
        return len(packed) - 1

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
            y = run(made, x)
        near(torch.autograd.grad(y.square().sum(), x)[0], want.double())
    with torch.autograd.graph.save_on_cpu():
        near(torch.autograd.grad(run(made, x).square().sum(), x)[0], want.double())


def test_errors_on_the_way_back(in_cpp: Any, plain: Plain) -> None:
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    of = rows.Rows.of(x, made.weight, made.bias, x.dtype)

    def fails(*arguments: Any) -> Any:
        raise ValueError("on the way")

    def too_few(*arguments: Any) -> Any:
        return ()

    for unusual, error in ((fails, ValueError), (too_few, RuntimeError), (lambda *given: 7, TypeError)):
        apply = in_cpp.Differentiable(of.with_stats, in_cpp.WayBack(), made._numbers, unusual)
        with pytest.raises(error):
            apply(x, made.weight, made.bias).sum().backward()
    for wrong in ((x, "weight", None), (None, None, None), (x,)):
        with pytest.raises((TypeError, RuntimeError)):
            apply(*wrong)
    for numbers in ((), [0.1]):
        with pytest.raises((TypeError, ValueError)):
            in_cpp.Differentiable(of.with_stats, in_cpp.WayBack(), numbers, fails)
    with pytest.raises(TypeError):
        in_cpp.Differentiable(None, None, made._numbers, fails)


def test_many_threads(plain: Plain) -> None:
    norms = [norm(8, removed) for removed in (1, 2, 3)]
    exact = [copy.deepcopy(made).double() for made in norms]

    def work(seed: int) -> float:
        x = torch.randn(4 + seed % 3, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        wide = x.detach().double().requires_grad_()
        got = torch.autograd.grad(run(norms[seed % 3], x).sin().sum(), x)[0]
        want = torch.autograd.grad(exact[seed % 3](wide).sin().sum(), wide)[0]
        return float((got - want).abs().max() / want.abs().max())

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(work, range(200))) < 2e-6


def test_nothing_is_kept(plain: Plain) -> None:
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    apply = fused._function(rows.Rows.of(x, made.weight, made.bias, x.dtype), made._numbers)

    def both() -> None:
        y = run(made, x)
        torch.autograd.grad(y, (x, made.weight), torch.ones(4, 8), retain_graph=True)
        torch.autograd.grad(y, x, torch.ones(8, 4).T)
        run(made, x)  # and no backward

    both()
    counted = x, made.weight, made.bias, made._numbers, apply
    gc.collect()
    before, objects = [sys.getrefcount(each) for each in counted], len(gc.get_objects())
    for _ in range(50):
        both()
    gc.collect()
    assert [sys.getrefcount(each) for each in counted] == before
    assert len(gc.get_objects()) < objects + 50


def test_a_graph_that_outlives_its_norm(plain: Plain) -> None:
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    y, gone = run(made, x), weakref.ref(made)
    want = torch.autograd.grad(run(made, x).sum(), x)[0]
    del made
    shortest.forget()
    gc.collect()
    assert gone() is None
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], want)
    y = x * 2  # what only C++ holds goes in a thread of autograd's, which has not Python's lock
    for _ in range(3):
        y = run(norm(), y)
        shortest.forget()
    y.sum().backward()


def test_from_then_on_it_is_used(in_cpp: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortest, "normalize", shortest.normalize)
    made, x = norm(), torch.randn(4, 8, requires_grad=True)
    monkeypatch.setattr(usual, "compiled", lambda: None)
    shortest.forget()
    y = run(made, x)  # as Python does it
    run(made, x).sum().backward()
    assert not isinstance(rows.Rows.of(x, made.weight, made.bias, x.dtype).with_stats, in_cpp.Way)
    monkeypatch.setattr(usual, "compiled", lambda: in_cpp)
    kernels = dict(rows._kernels)
    shortest._shorten(in_cpp)
    assert type(shortest.normalize) is type(len) and rows._kernels == kernels
    for _ in range(2):
        run(made, x).sum().backward()
    assert plain.by_driver == 4 and plain.by_triton == 3  # what Python has compiled is known
    y.sum().backward()
