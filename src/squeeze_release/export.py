"""A network as a file that runs elsewhere: ONNX, or torch.export's own .pt2. Neither needs this package.

The file appears only after it has been read back and has given what the network gives: at the size of the example's
batch, at 1 and at 3.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .batches import batch_of, has_batch, one_call, with_batch
from .copies import borrowed
from .errors import ExportError, InputError
from .masks import bake_masks
from .rehearse import Call
from .trace.caches import without_cache
from .unwrap import unwrap
from .verify import isolated, map_tensors, redrawn, relative_error, rounding_allowed, tensors_in

_TOLERANCE = 1e-5
_BATCHES = (1, 3)  # that are tried beside the example's own
_LARGEST_ONNX = 2**31 - 2**26  # bytes: protobuf ends at 2 GiB, and beyond it the weights get a file of their own

_Runner = Callable[[Call], list[Tensor]]


@dataclass(frozen=True)
class Exported:
    """A file that was written, and how it was checked."""

    path: Path
    bytes: int
    batches: tuple[int, ...]
    """The sizes of the batch at which file and network were compared."""
    max_error: float | None
    """Largest relative difference between them; None where onnxruntime is not installed and nothing was compared."""


def export(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_batch: bool = True,
    tolerance: float | None = None,
) -> Exported:
    """Write a network, squeezed or not, as ONNX (`.onnx`) or for `torch.export.load` (`.pt2`), and check the file.

    It computes what the network computes in eval mode, with masks as zeros. Tables of outputs such as transformers'
    become plain dicts, and what models keep for their next call is left out. The network itself is left as it is.

    Args:
        example_inputs: a tensor or a tuple of arguments; `kwargs` go with them.
        path: where to; the suffix says what to write.
        dynamic_batch: take any size along the first dimension of the first tensor, and of all that share its size.
        tolerance: how far the file may be from the network, relative to the largest entry of each output: 1e-5, and
            what rounding does to float16 and bfloat16.

    Raises ExportError where the model cannot be exported, or where the file does not compute the same; there is no file
    then.
    """
    path = Path(path)
    write = _writer(path)
    call = map_tensors(one_call(example_inputs, kwargs, of="export"), Tensor.clone)  # one tensor in two places is two
    with borrowed(unwrap(model)) as network:
        bake_masks(network)
        if write is _write_onnx:
            network.cpu()  # an ONNX file knows no devices, and another device would round otherwise
            call = map_tensors(call, Tensor.cpu)
        with _as_deployed(network):
            calls = _calls(network, call, dynamic_batch)
            bound = max(_TOLERANCE, rounding_allowed(network, [call])) if tolerance is None else tolerance
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=_folder(path)) as beside:
                file = Path(beside) / path.name
                run = write(_program(network, call, dynamic_batch), file, network, call, dynamic_batch)
                error = None if run is None else max(_compare(network, run, each, bound, file) for each in calls)
                for part in sorted(Path(beside).iterdir(), reverse=True):  # weights of their own first
                    os.replace(part, path.parent / part.name)
    if error is None:
        warnings.warn(f"{path.name} was not compared: onnxruntime is not installed", stacklevel=2)
    return Exported(path, path.stat().st_size, tuple(dict.fromkeys(map(batch_of, calls))), error)


def _writer(path: Path) -> Callable[..., _Runner | None]:
    if path.suffix not in (".onnx", ".pt2"):
        raise InputError(
            f"{path.suffix or 'no suffix'!r} says nothing about the format",
            where=f"export(..., {str(path)!r})",
            consequence="nothing was exported",
            remedy="end the path with .onnx or .pt2",
        )
    if path.suffix == ".pt2":
        return _write_pt2
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise InputError(
                f"{package} is not installed",
                where="export to ONNX",
                consequence="nothing was exported",
                remedy="pip install 'squeeze-release[export]', or export to .pt2, for which torch is enough",
            )
    return _write_onnx


def _folder(path: Path) -> Path:
    if not path.parent.is_dir():
        raise InputError(
            f"there is no folder {str(path.parent)!r}",
            where=f"export(..., {str(path)!r})",
            consequence="nothing was exported",
            remedy="make it first",
        )
    return path.parent


@contextlib.contextmanager
def _as_deployed(network: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, plain outputs; and without the fused encoder of torch, which no other runtime has."""
    network.eval()
    network.register_forward_hook(lambda module, args, output: _plain(output))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with isolated(network), torch.no_grad(), without_cache(network):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _plain(output: Any) -> Any:
    """Without classes that whoever loads the file would have to import."""
    if isinstance(output, Mapping):
        return {str(name): _plain(value) for name, value in output.items() if value is not None}
    if isinstance(output, (tuple, list)):
        return tuple(_plain(value) for value in output)
    return output


def _calls(network: nn.Module, call: Call, dynamic: bool) -> list[Call]:
    """What is compared: the example, and random inputs, in several sizes where the batch is dynamic."""
    batch = batch_of(call)
    found = [call, redrawn(call)]
    if dynamic and batch:
        found += [redrawn(with_batch(call, size)) for size in _BATCHES if size != batch]
    for each in found:
        try:
            network(*each[0], **each[1])
        except Exception as cause:
            if batch_of(each) == batch:
                raise _failed(network, "the model does not run on the example inputs", cause, "correct them") from cause
            raise _fixed(network, f"the model does not take a batch of {batch_of(each)}", cause) from cause
    return found


def _program(network: nn.Module, call: Call, dynamic: bool) -> torch.export.ExportedProgram:
    if dynamic and batch_of(call) == 1:
        call = with_batch(call, 2)  # a size of 1 would be taken for a constant
    shapes = _dynamic_shapes(network, call) if dynamic else None
    try:
        return torch.export.export(network, *call, dynamic_shapes=shapes, strict=False)
    except Exception as cause:
        if dynamic and _exports(network, call):
            raise _fixed(network, "the code of the model fixes the size of the batch", cause) from cause
        remedy = "make torch.export.export(model.eval(), args, strict=False) work; branches on data are the usual cause"
        raise _failed(network, "torch.export cannot trace this model", cause, remedy) from cause


def _dynamic_shapes(network: nn.Module, call: Call) -> dict[str, Any]:
    """By the names of the arguments, positional ones too."""
    batch, dim = batch_of(call), torch.export.Dim("batch")
    args, kwargs = pytree.tree_map(lambda leaf: {0: dim} if has_batch(leaf, batch) else None, call)
    return dict(inspect.signature(network.forward).bind_partial(*args, **kwargs).arguments)


def _exports(network: nn.Module, call: Call) -> bool:
    try:
        torch.export.export(network, *call, strict=False)
    except Exception:
        return False
    return True


# --- the formats -----------------------------------------------------------------------------------------------------


def _write_pt2(program: torch.export.ExportedProgram, file: Path, network: nn.Module, *_: object) -> _Runner:
    try:
        torch.export.save(program, file)
        module = torch.export.load(file).module()
    except Exception as cause:
        raise _failed(network, "torch.export cannot save or load this model", cause, "try ONNX") from cause
    return lambda call: tensors_in(module(*call[0], **call[1]))


def _write_onnx(
    program: torch.export.ExportedProgram, file: Path, network: nn.Module, call: Call, dynamic: bool
) -> _Runner | None:
    size = sum(tensor.nbytes for tensor in [*network.parameters(), *network.buffers()])
    try:
        names = _output_names(network, call)
        axes = [{0: "batch"} if dynamic and has_batch(t, batch_of(call)) else {} for t in tensors_in(call)]
        made = torch.onnx.export(program, dynamo=True, verbose=False, output_names=names, dynamic_shapes=axes)
        assert made is not None
        made.save(file, external_data=size > _LARGEST_ONNX)
    except Exception as cause:
        raise _failed(network, "the ONNX exporter cannot translate this model", cause, "try .pt2") from cause
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as cause:
        remedy = "export model.float(), for onnxruntime does little in other dtypes; or try .pt2"
        raise _failed(network, "onnxruntime cannot load the file", cause, remedy) from cause
    return partial(_run_onnx, session)


def _run_onnx(session: Any, call: Call) -> list[Tensor]:
    names = [each.name for each in session.get_inputs()]
    feed = dict(zip(names, (tensor.numpy() for tensor in tensors_in(call)), strict=True))
    return [torch.from_numpy(output) for output in session.run(None, feed)]


def _output_names(network: nn.Module, call: Call) -> list[str]:
    output = network(*call[0], **call[1])
    if isinstance(output, dict) and all(isinstance(value, Tensor) for value in output.values()):
        return list(output)
    count = len(tensors_in(output))
    return ["output"] if count == 1 else [f"output_{i}" for i in range(count)]


def _compare(network: nn.Module, run: _Runner, call: Call, bound: float, file: Path) -> float:
    expected = tensors_in(network(*call[0], **call[1]))
    try:
        actual = run(call)
    except Exception as cause:
        raise _fixed(network, f"{file.name} does not run on a batch of {batch_of(call)}", cause) from cause
    if len(actual) != len(expected):
        raise _failed(network, f"{file.name} has {len(actual)} outputs, the network {len(expected)}", None, "report it")
    error = max((relative_error(old, new) for old, new in zip(expected, actual, strict=True)), default=0.0)
    if error > bound:
        raise ExportError(
            f"{file.name} differs from the network by {error:.1e}, allowed are {bound:.1e}",
            where=f"{type(network).__name__}, a batch of {batch_of(call)}",
            consequence="no file was left behind",
            remedy="try the other format; where the model itself rounds that much, pass tolerance= (--tolerance)",
        )
    return error


def _fixed(network: nn.Module, what: str, cause: Exception) -> ExportError:
    return _failed(network, what, cause, "pass dynamic_batch=False (--fixed-batch), and an example of the size to use")


def _failed(network: nn.Module, what: str, cause: Exception | None, remedy: str) -> ExportError:
    lines = str(cause).strip().splitlines() if cause is not None else []
    return ExportError(
        f"{what}: {type(cause).__name__}: {lines[0]}" if lines else what,
        where=type(network).__name__,
        consequence="nothing was exported, and no file was left behind",
        remedy=remedy,
    )
