"""Padding by nothing is nothing only where the model takes no other size."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from check import check, noisy, seeded
from torch import Tensor, nn

import squeeze_release as sr
from squeeze_release.trace.sizes import other_paths, takes_other_sizes

SIZE = 12


class Merging(nn.Module):
    """Swin's: four neighbours become one, and where these are not even a row of zeros is added."""

    def __init__(self, sizes: str) -> None:
        super().__init__()
        self.sizes = sizes
        self.stem, self.norm, self.out = nn.Conv2d(3, 8, 1), nn.LayerNorm(32), nn.Linear(32, 5)

    def check_size(self, h: int) -> None:
        allowed = {"any": True, "multiples": h % 4 == 0, "smaller": h <= SIZE and h % 3 == 0}
        torch._assert(allowed.get(self.sizes, h == SIZE), "wrong size")

    def forward(self, x: Tensor) -> Tensor:
        self.check_size(x.size(2))
        if self.sizes != "any width":
            self.check_size(x.size(3))
        x = self.stem(x).permute(0, 2, 3, 1)
        x = F.pad(x, (0, 0, 0, x.size(2) % 2, 0, x.size(1) % 2))
        b, h, w, c = x.shape
        x = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).flatten(3)
        return self.out(self.norm(x))


def net(sizes: str) -> Merging:
    seeded()
    model = noisy(Merging(sizes))
    with torch.no_grad():
        model.stem.weight[[1, 4, 6]] = 0
    return model


def image(size: int = SIZE) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64)


def test_constants_pass_padding_by_nothing_in_a_model_of_one_size() -> None:
    """Two carriers for the norm stay in each of the four places."""
    small = check(net("one"), image(), golden={"stem.out_channels": 7, "norm.removed": 4}).model
    assert small.out.in_features == 28


@pytest.mark.parametrize("sizes", ["any", "any width", "multiples", "smaller"])
def test_constants_stay_where_another_size_may_pad(sizes: str) -> None:
    model = net(sizes)
    small = check(model, image(), golden={"stem.out_channels": 8, "norm": nn.LayerNorm}).model
    taken = 0
    for height, width in itertools.product((9, 11, 12, 15, 16), repeat=2):
        x = torch.randn(2, 3, height, width, dtype=torch.float64)
        try:
            want = model(x)
        except AssertionError:
            continue
        assert torch.allclose(small(x), want, atol=1e-12)
        taken += 1
    assert taken > 1


def test_two_examples_of_different_sizes_are_two_sizes() -> None:
    class Two(Merging):
        def check_size(self, h: int) -> None:
            torch._assert(h in (SIZE, 2 * SIZE + 5), "wrong size")

    seeded()
    model = noisy(Two("one")).double()
    with torch.no_grad():
        model.stem.weight[[1, 4, 6]] = 0
    small = sr.squeeze(model, [image(), image(2 * SIZE + 5)]).model
    assert small.stem.out_channels == 8


@pytest.mark.parametrize(
    ("code", "shapes", "other"),
    [
        (lambda x: x.view(2, 12), [(2, 12)], False),
        (lambda x: x.sum(1), [(2, 12)], True),
        (lambda x: x.view(2, 3, 12), [(2, 3, 12)], False),
        (lambda x: x.unflatten(2, (-1, 4)), [(2, 3, 12)], True),  # multiples of 4
        (lambda x: x[:, :, :8].view(2, 3, 8), [(2, 3, 12)], True),  # 8 or more
        (lambda x: x[:, 11], [(2, 12)], True),
        (lambda x: x.expand(2, 3, 6, 12), [(2, 3, 6, 12)], True),  # 1 in place of any
        (lambda x, y: x.view(2, 12), [(2, 12), (2, 3)], True),  # nobody knows how they hang together
    ],
)
def test_other_sizes_are_found(code: object, shapes: list[tuple[int, ...]], other: bool) -> None:
    model = nn.Module()
    model.forward = code  # type: ignore[method-assign, assignment]
    call = (tuple(torch.randn(shape) for shape in shapes), {})
    assert takes_other_sizes(model, [call]) is other
    assert takes_other_sizes(model, [((torch.ones(2, 12, dtype=torch.int64),), {})])


# ----------------------------------------------------------------------------------- what code does at other sizes only


class PadsIfOdd(Merging):
    """transformers' Swin: the padding is behind an `if`, so that a trace of an even size does not show it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        if x.size(1) % 2 or x.size(2) % 2:
            x = self.at_odd_sizes(x)
        b, h, w, c = x.shape
        x = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).flatten(3)
        return self.out(self.norm(x))

    def at_odd_sizes(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, x.size(2) % 2, 0, x.size(1) % 2))


class CutsIfOdd(PadsIfOdd):
    def at_odd_sizes(self, x: Tensor) -> Tensor:
        return x[:, : x.size(1) // 2 * 2, : x.size(2) // 2 * 2]


@pytest.mark.parametrize(("kind", "left"), [(PadsIfOdd, 8), (CutsIfOdd, 7)])
def test_what_the_code_does_at_another_size_counts(kind: type[Merging], left: int) -> None:
    seeded()
    model = noisy(kind("any"))
    with torch.no_grad():
        model.stem.weight[[1, 4, 6]] = 0
    small = check(model, image(), golden={"stem.out_channels": left}).model
    for size in (10, 11, 13, 17):
        assert torch.allclose(small(x := image(size)), model(x), atol=1e-12)


def test_one_size_for_each_other_path() -> None:
    even, odd = ((image(),), {}), ((image(SIZE + 1),), {})
    assert other_paths(CutsIfOdd("any").double(), [even]) == []
    found = other_paths(PadsIfOdd("any").double(), [even])
    assert len(found) == 1 and found[0][0][0].size(2) % 2
    assert other_paths(PadsIfOdd("any").double(), [even, odd]) == []


def test_a_path_that_cannot_be_traced_is_left_out() -> None:
    class Branches(PadsIfOdd):
        def at_odd_sizes(self, x: Tensor) -> Tensor:
            return super().at_odd_sizes(x if float(x.sum()) > 0 else 2 * x)

    seeded()
    check(noisy(Branches("any")), image())
