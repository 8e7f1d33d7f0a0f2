"""How a kernel is launched again: what is checked before torch's launcher is believed, and what is left without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from squeeze_release.modules import launch

PTX = """
.version 8.7
.target sm_90a
.visible .entry forward(
	.param .u64 .ptr .global .align 1 forward_param_0,
	.param .u64 .ptr .global .align 1 forward_param_1,
	.param .u32 forward_param_2,
	.param .f32 forward_param_3,
	.param .u64 .ptr .global .align 1 forward_param_4
)
.reqntid 128
{
	.param .b64 elsewhere;
}
"""
ADDRESSES, NUMBERS, CONSTANTS = [16, 32], (7, 0.5), (True, 8)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What torch's launcher is told; this build of torch may have none."""
    calls: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(_launch_kernel=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", fake, raising=False)
    return calls


def kernel(run: Any, **metadata: Any) -> SimpleNamespace:
    """As Triton hands it over."""
    usual = {"num_warps": 4, "shared": 32, "global_scratch_size": 0, "profile_scratch_size": 0}
    usual |= {"launch_cooperative_grid": False, "launch_pdl": False, "num_ctas": 1} | metadata
    asm = {"ptx": PTX}
    return SimpleNamespace(metadata=SimpleNamespace(**usual), asm=asm, function=99, packed_metadata="m", run=run)


def shortest(found: Any) -> launch.Short | None:
    return launch._shortest(found, CONSTANTS, (3, 1, 5), ADDRESSES, NUMBERS)


def never(*arguments: Any) -> None:
    raise AssertionError("Triton's launcher was asked")


def test_parameters_are_read_from_the_kernel() -> None:
    assert launch.parameter_bits(PTX) == [64, 64, 32, 32, 64]


def test_torch_launches_with_what_the_kernel_takes(launched: list[tuple[Any, ...]]) -> None:
    short = shortest(kernel(never))
    assert short is not None
    short.launch(short.function, 2, 1, 1, short.warps, short.shared, short.types, (48, 64, 8, 0.25, *short.nothing), 6)
    assert launched == [
        (99, 3, 1, 1, 4, 32, "OOifO", (16, 32, 7, 0.5, None), 5),
        (99, 2, 1, 1, 4, 32, "OOifO", (48, 64, 8, 0.25, None), 6),
    ]


@pytest.mark.parametrize(
    "metadata", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"launch_pdl": True}, {"num_ctas": 2}]
)
def test_a_kernel_that_wants_more_goes_by_triton(metadata: dict[str, Any], launched: list[tuple[Any, ...]]) -> None:
    calls: list[tuple[Any, ...]] = []
    assert shortest(kernel(lambda *arguments: calls.append(arguments), **metadata)) is not None
    assert calls == [(3, 1, 1, 5, 99, "m", None, None, None, 16, 32, 7, 0.5, True, 8)] and not launched


@pytest.mark.parametrize(
    "other",
    [
        PTX.replace(".u32 forward_param_2", ".u64 forward_param_2"),
        PTX.replace(".param .f32 forward_param_3,", "").replace(
            ".param .u64 .ptr .global .align 1 forward_param_4", ""
        ),
        "not assembly",
    ],
    ids=["a number of 64 bits", "fewer", "none"],
)
def test_other_parameters_are_never_launched_by_torch(other: str, launched: list[tuple[Any, ...]]) -> None:
    calls: list[tuple[Any, ...]] = []
    found = kernel(lambda *arguments: calls.append(arguments))
    found.asm["ptx"] = other
    assert shortest(found) is not None
    assert len(calls) == 1 and not launched


def test_without_either_the_long_way_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_StaticCudaLauncher", raising=False)

    def refuses(*arguments: Any) -> None:
        raise TypeError("takes other arguments")

    assert shortest(kernel(refuses)) is None
