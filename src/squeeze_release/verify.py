"""Old against new: the rewritten network must compute what the original computes, on every path a user can take.

Both run as float64 copies, in eager and eval mode: with gradients and without (nn.TransformerEncoderLayer takes another
path then), on the example, on random inputs, other batch sizes, resolutions and lengths, and with attention
implementations switched. A variant counts only where the original runs on it. A last look is in the user's own dtype.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .copies import copy_model
from .errors import InputError, VerificationError
from .masks import InFloat64, to_float64, widen
from .rehearse import Call, Rehearsal
from .trace.caches import without_cache

_Outputs = dict[str, Any]

# What rounding may do in the user's own dtype; more is accepted only where the original itself is less accurate.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_COARSEST_ROUNDING = 0.2  # float8
# Attributes that choose between two implementations, and the other value of each.
_SWITCHES = ("fused_attn", "_attn_implementation")
_OTHER: dict[Any, Any] = {True: False, False: True, "sdpa": "eager", "eager": "sdpa"}
_SMALLEST_SCALE = 1e-6
_MASKED = 1e9  # entries this large may stand for infinity: equal ones do not set the scale that errors are measured on


@dataclass(frozen=True)
class Verification:
    """What was compared, and how far apart the networks are: max |new - old| / max |old|, the worst output tensor."""

    max_error: float  # in float64, over all variants
    max_error_user: float  # on the example calls in the user's own dtype: rounding
    variants: tuple[tuple[str, float], ...]  # each one that the original runs on, and its error
    seconds: float


@dataclass(frozen=True)
class _Variant:
    name: str
    call: Call
    grad: bool
    switch: str = ""  # the attribute to flip, one of _SWITCHES
    lift: bool = True  # keep everything in float64, against casts to lower precision in the model


@dataclass(frozen=True)
class _Finding:
    variant: _Variant
    error: float
    where: str
    cause: Exception | None = None
    ops: tuple[Any, ...] = ()  # the operators that both networks ran


def verify(
    old: nn.Module, new: nn.Module, calls: list[Call], *, exact: nn.Module | None = None, tolerance: float = 1e-10
) -> Verification:
    """Compare two models on example calls `(args, kwargs)` and on variations of them; neither model is changed.

    `exact` is `new` before its weights were rounded to the user's dtype; the float64 runs take it in place of `new`.
    Raises VerificationError where the outputs differ by more than `tolerance`, relative to the largest entry of each.
    Forward hooks belong to the model and run with it.
    """
    if not calls:
        raise ValueError("verify needs at least one example call")
    start = time.perf_counter()
    old, new = copy_model(old).eval(), copy_model(new).eval()
    calls = [map_tensors(call, lambda tensor: tensor) for call in calls]
    with isolated(old), without_cache(old, new, *([] if exact is None else [exact])):
        rounding = rounding_allowed(old, calls)
        rounded = [_run_rounded(old, new, call) for call in calls] if rounding > _ROUNDING[torch.float64] else []
        new = new if exact is None else copy_model(exact).eval()
        to_float64(old)
        to_float64(new)
        findings = [finding for call in calls for finding in _compare_call(old, new, map_tensors(call, widen))]
        _raise_if_different(old, findings, tolerance)
        max_error = max(finding.error for finding in findings)
        max_error_user = max((_check_rounded(old, rounding, *runs) for runs in rounded if runs), default=max_error)
    variants = tuple((finding.variant.name, finding.error) for finding in findings)
    return Verification(max_error, max_error_user, variants, time.perf_counter() - start)


def _compare_call(old: nn.Module, new: nn.Module, call: Call) -> Iterator[_Finding]:
    def compare(name: str, inputs: Call, modes: tuple[str, ...], switch: str = "") -> list[_Finding]:
        variants = [_Variant(f"{name}, {mode}", inputs, mode == "grad", switch) for mode in modes]
        return [finding for variant in variants if (finding := _compare(old, new, variant))]

    example = compare("example", call, ("no_grad", "grad"))
    if not example:
        raise _does_not_run(old, call)
    yield from example
    # Where gradients choose no other operators, the variants below need not run twice.
    modes = ("no_grad",) if len({finding.ops for finding in example}) == 1 else ("no_grad", "grad")
    rehearsal = Rehearsal(old, [call])
    for alternatives in _input_variants(call):
        found = (compare(name, inputs, modes) for name, inputs in alternatives if rehearsal.allows(inputs))
        yield from next(filter(None, found), [])  # the first alternative that the original takes is enough
    for switch in _SWITCHES:
        if _switchable(old, switch):
            yield from compare(f"{switch} switched", redrawn(call), ("no_grad",), switch)


def _compare(old: nn.Module, new: nn.Module, variant: _Variant) -> _Finding | None:
    """None where the original itself does not run."""
    try:
        expected, old_ops = _run(old, variant)
    except Exception:
        return None
    try:
        actual, new_ops = _run(new, variant)
    except Exception as error:
        return _raising(variant, error)
    return _Finding(variant, *_difference(expected, actual), ops=(*old_ops, "|", *new_ops))


def _run(model: nn.Module, variant: _Variant, seed: int = 0) -> tuple[_Outputs, list[Any]]:
    """The outputs, and the operators that ran."""
    args, kwargs = copy.deepcopy(variant.call)  # a model may write into its inputs
    _seed(model, seed)
    mode = InFloat64(variant.lift)
    with _switched(model, variant.switch), torch.set_grad_enabled(variant.grad), mode:
        return dict(_leaves(model(*args, **kwargs))), mode.ops


def _raise_if_different(old: nn.Module, findings: list[_Finding], tolerance: float) -> None:
    worst = max(findings, key=lambda finding: finding.error)
    if worst.error <= tolerance:
        return
    own_difference, _ = _difference(*(_run(old, worst.variant, seed)[0] for seed in (0, 1)))
    if own_difference > tolerance:
        raise VerificationError(
            f"the original is not deterministic: two runs on one input differ by {own_difference:.1e}",
            where=worst.variant.name,
            consequence="old and new cannot be compared; no network is returned and your model is untouched",
            remedy="remove the randomness from eval mode, or pass verify=False",
        )
    raise _different(worst, tolerance) from worst.cause


def _different(finding: _Finding, allowed: float) -> VerificationError:
    return VerificationError(
        f"the rewritten network differs from the original by {finding.error:.1e}, allowed are {allowed:.1e}",
        where=f"{finding.where}; variant: {finding.variant.name}",
        consequence="no network is returned; your model is untouched",
        remedy="a rule is wrong: please report this message; until it is mended, name the module in keep=",
    )


def _raising(variant: _Variant, error: Exception) -> _Finding:
    return _Finding(variant, math.inf, f"the rewritten network raises {type(error).__name__}: {error}", error)


def _does_not_run(old: nn.Module, call: Call) -> InputError:
    why: Exception | None = None
    try:
        _run(old, _Variant("example", call, grad=False))
    except Exception as error:
        why = error
    return InputError(
        f"the original does not run on the example inputs in float64: {type(why).__name__}: {why}",
        where=type(old).__name__,
        consequence="old and new cannot be compared; your model is untouched",
        remedy="correct the example inputs; if they run in the model's own dtype only, pass verify=False",
    )


def _difference(expected: _Outputs, actual: _Outputs) -> tuple[float, str]:
    """The worst error of all outputs, and the output it is in."""
    if expected.keys() != actual.keys():
        return math.inf, f"the outputs have another structure: {', '.join(sorted(expected.keys() ^ actual.keys()))}"
    return max(((relative_error(expected[name], actual[name]), name) for name in expected), default=(0.0, "no output"))


def relative_error(old: Any, new: Any) -> float:
    if isinstance(old, float) and isinstance(new, float):
        old, new = torch.tensor(old, dtype=torch.float64), torch.tensor(new, dtype=torch.float64)
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        comparable = isinstance(old, (int, str, bytes))  # other objects have no equality to speak of
        return 0.0 if type(old) is type(new) and (not comparable or old == new) else math.inf
    if old.shape != new.shape or old.dtype != new.dtype:
        return math.inf
    new = new.to(old.device)
    wrong = ~((old == new) | (old.isnan() & new.isnan()))  # equal infinities are equal
    if not wrong.any() or not _is_inexact(old):
        return math.inf if wrong.any() else 0.0
    size = old.abs()
    scale = size[wrong | (size < _MASKED)].max().clamp(min=_SMALLEST_SCALE)
    error = float(((new - old).abs()[wrong] / scale).max())
    return error if math.isfinite(error) else math.inf


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _leaves(value: Any, path: str = "output", above: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values of an output, by path; containers count as leaves of their own, by their class."""
    if isinstance(value, Tensor):
        yield path, value.detach() if value.layout is torch.strided else value.detach().to_dense()
        return
    parts = _parts(value) if id(value) not in above else None
    if parts is None:
        yield path, value
        return
    yield f"{path}: {type(value).__name__}", None
    for key, part in parts:
        yield from _leaves(part, f"{path}[{key!r}]", above | {id(value)})


def _parts(value: Any) -> Iterable[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if type(value) in pytree.SUPPORTED_NODES:
        return enumerate(pytree.tree_leaves(value))
    if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        return list(vars(value).items())
    return None


def rounding_allowed(model: nn.Module, calls: list[Call]) -> float:
    dtypes = {tensor.dtype for tensor in [*model.parameters(), *tensors_in(calls)] if tensor.is_floating_point()}
    return max((_ROUNDING.get(dtype, _COARSEST_ROUNDING) for dtype in dtypes), default=_ROUNDING[torch.float64])


def _run_rounded(old: nn.Module, new: nn.Module, call: Call) -> tuple[_Variant, _Outputs, _Outputs] | None:
    """Both in the user's own dtype; None where the original does not run in it."""
    for grad in (False, True):  # a model that differentiates inside its forward does not run without gradients
        variant = _Variant("example in the model's own dtype", call, grad, lift=False)
        try:
            expected = _run(old, variant)[0]
        except Exception:
            continue
        try:
            return variant, _floats(expected), _floats(_run(new, variant)[0])
        except Exception as error:
            raise _different(_raising(variant, error), 0.0) from error
    return None


def _check_rounded(old: nn.Module, rounding: float, variant: _Variant, old_run: _Outputs, new_run: _Outputs) -> float:
    """Both runs are measured against `old`, the float64 copy: new may not be less accurate than the original."""
    exact = _floats(_run(old, replace(variant, call=map_tensors(variant.call, widen), lift=True))[0])
    allowed = max(4 * _difference(exact, old_run)[0], rounding)
    finding = _Finding(variant, *_difference(exact, new_run))
    if finding.error > allowed:
        raise _different(finding, allowed)
    return _difference(old_run, new_run)[0]


def _floats(outputs: _Outputs) -> _Outputs:
    """What rounding moves gently: an argmax may flip."""
    return {name: widen(leaf) for name, leaf in outputs.items() if isinstance(leaf, Tensor) and _is_inexact(leaf)}


def _input_variants(call: Call) -> Iterator[list[tuple[str, Call]]]:
    """Lists of alternatives, of which one is enough; few samples, for float64 is slow."""
    tensors, few = tensors_in(call), call
    batches = {tensor.shape[0] for tensor in tensors if tensor.ndim}
    if len(batches) == 1 and (batch := batches.pop()) > 0:
        several, few_samples = 3 if batch != 3 else 2, 1 if batch > 1 else 2
        few = map_tensors(call, partial(resized, dim=0, size=few_samples))
        random = redrawn(call, partial(resized, dim=0, size=several))
        yield [(f"random inputs, batch of {several}", random), ("random inputs", redrawn(call))]
        yield [(f"batch of {few_samples}", few)]
    else:
        yield [("random inputs", redrawn(call))]
    if any(tensor.is_floating_point() and tensor.ndim >= 3 for tensor in tensors):
        stretched, alike = (partial(_other_resolution, last=last) for last in (2, 1))
        yield [("other resolution", redrawn(*inputs)) for inputs in ((few, stretched), (few, alike), (call, alike))]
    for old in [t.shape[1] for t in tensors if t.ndim == (3 if t.is_floating_point() else 2) and t.shape[1] > 1][:1]:
        longer, shorter = (partial(_other_length, old=old, new=new) for new in (old + _step(old), old // 2))
        yield [("other length", redrawn(*inputs)) for inputs in ((few, longer), (few, shorter), (call, longer))]


def _other_resolution(tensor: Tensor, last: int) -> Tensor:
    """(N, C, H, W) with other H and W, the last by `last` steps; alike (N, C, L) and (N, C, D, H, W)."""
    for dim in range(2, tensor.ndim):
        size = tensor.shape[dim]
        change = _step(size) * (last if dim == tensor.ndim - 1 else 1)
        tensor = resized(tensor, dim, size - change if size > 4 * _step(size) else size + change)
    return tensor


def _other_length(tensor: Tensor, old: int, new: int) -> Tensor:
    """(N, T), (N, T, C) and masks (N, 1, T, T) with another T."""
    for dim in range(1, tensor.ndim):
        tensor = resized(tensor, dim, new) if tensor.shape[dim] == old else tensor
    return tensor


def _step(size: int) -> int:
    return math.gcd(size, 32)  # multiples of 32 stay multiples of 32, and so do those of 16, 8, 4 and 2


def resized(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Cut, or repeated from the start."""
    places = torch.arange(size, device=tensor.device) % tensor.shape[dim] if tensor.ndim else None
    return tensor if places is None else tensor.index_select(dim, places)


def redrawn(call: Call, reshape: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Call:
    generator = torch.Generator().manual_seed(0)
    return map_tensors(call, lambda tensor: _random_like(reshape(tensor), generator))


def _random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.numel() == 0 or tensor.dtype is torch.bool or tensor.is_complex():
        return tensor
    low, high = tensor.min(), tensor.max()
    if not tensor.is_floating_point():
        values = torch.randint(int(low), int(high) + 1, tensor.shape, generator=generator)
    elif low > -_MASKED and high < _MASKED:
        spread = float(tensor.std(correction=0)) or 1.0
        values = float(tensor.mean()) + spread * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    else:
        return tensor  # an additive attention mask
    return torch.empty_like(tensor).copy_(values)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """The new tensors are leaves, for only leaves can be copied, and keep requires_grad: forces are -dE/dx."""
    mapped: Call = pytree.tree_map_only(
        Tensor, lambda tensor: change(tensor.detach()).detach().requires_grad_(tensor.requires_grad), call
    )
    return mapped


@contextlib.contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Eager, without autocast, and with the caller's random numbers left alone."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices(model), device_type="cuda"))
        for device_type in {"cpu", *(parameter.device.type for parameter in model.parameters())}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Where warnings are errors, the original would seem not to run.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})


def _seed(model: nn.Module, seed: int) -> None:
    # Not torch.manual_seed: it also seeds devices that fork_rng does not restore.
    torch.default_generator.manual_seed(seed)
    for index in _cuda_devices(model):
        torch.cuda.default_generators[index].manual_seed(seed)


def _switchable(model: nn.Module, attribute: str) -> list[Any]:
    """Who holds the switch: attention modules of timm, configs of transformers, which every forward looks up."""
    owners = {id(owner): owner for module in model.modules() for owner in (module, getattr(module, "config", None))}
    values = [(owner, getattr(owner, attribute, None)) for owner in owners.values()]
    return [owner for owner, value in values if isinstance(value, (bool, str)) and value in _OTHER]


@contextlib.contextmanager
def _switched(model: nn.Module, attribute: str) -> Iterator[None]:
    settings = [(owner, getattr(owner, attribute)) for owner in _switchable(model, attribute)]
    try:
        for owner, value in settings:
            setattr(owner, attribute, _OTHER[value])
        yield
    finally:
        for owner, value in settings:
            setattr(owner, attribute, value)
