"""The file: safetensors with one JSON text in its metadata. Written whole or not at all; read as if it were hostile."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
_KEY = "squeeze_release"
_LONGEST_HEADER = 100_000_000  # bytes, as for safetensors
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

# What the JSON must look like: [x] is a list of x, {str: x} a table of x under any names.
_FORM = {
    "format": int,
    "package": str,
    "full": {"parameters": {str: [int]}, "modules": {str: str}, "settings": {str: {str: object}}},
    "stand_ins": {str: {str: object}},
    "numbers": {str: {str: [object]}},
    "ties": {str: [str]},
    "frozen": [str],
    "temporary": [str],
    "channels_last": [str],
    "checksums": {str: int},
    "sha256": str,
}


class Misfit(Exception):
    """What is wrong and where: the cause, to which `save` and `load` add what it means for the caller."""

    def __init__(self, what: str, where: str, remedy: str = "") -> None:
        self.what, self.where, self.remedy = _line(what), _line(where) or "the model itself", remedy
        super().__init__(what)


class Archive:
    """An open file whose JSON has the right form, and whose tensors are read one by one."""

    def __init__(self, file: Any, contents: dict[str, Any]) -> None:
        self.contents, self._file = contents, file
        stored = {*file.keys()}
        tied = [name for names in contents["ties"].values() for name in names]
        if len({*tied}) < len(tied) or stored & {*tied}:
            raise Misfit("a name stands for two tensors", "the ties")
        for table in ("checksums", "ties", "frozen", "temporary", "channels_last"):
            if unknown := sorted({*contents[table]} - stored):
                raise Misfit(f"the file says something about {unknown[0]}, and has no such tensor", f"its {table}")
        self.names: dict[str, list[str]] = {name: [name, *contents["ties"].get(name, ())] for name in sorted(stored)}
        self._channels_last = {*contents["channels_last"]}

    def read(self, name: str) -> Tensor:
        """A tensor that lives in the file; nothing is allocated."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except Exception as error:  # a dtype that torch does not have
            raise Misfit(f"{name} cannot be read: {error}", name) from None
        if _checksum(tensor) != self.contents["checksums"].get(name):
            raise Misfit(f"the numbers of {name} are not those that were saved", name)
        return tensor

    def shape(self, name: str) -> list[int]:
        """From the header: the tensor is not read."""
        if name not in self.names:
            raise Misfit("the file has no such tensor", name)
        return [*self._file.get_slice(name).get_shape()]

    def own(self, name: str, tensor: Tensor, device: torch.device | None) -> Tensor:
        """That tensor in memory of its own, laid out as it was: the file may go or change."""
        layout = _CHANNELS_LAST.get(tensor.dim()) if name in self._channels_last else None
        return torch.empty_like(tensor, device=device, memory_format=layout or torch.contiguous_format).copy_(tensor)


def write(path: str, tensors: Mapping[str, Tensor], contents: dict[str, Any]) -> None:
    """To a file beside `path` that takes its place once it is on the disk."""
    data = _own_memory(tensors)
    contents = {
        "format": FORMAT,
        **contents,
        "channels_last": [name for name, tensor in tensors.items() if _is_channels_last(tensor)],
        "checksums": {name: _checksum(tensor) for name, tensor in data.items()},
    }
    text = json.dumps({**contents, "sha256": _digest(contents)}, sort_keys=True, separators=(",", ":"))
    beside = f"{path}.{secrets.token_hex(4)}.part"
    with open(beside, "xb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
    try:
        _save(data, beside, text)
        os.chmod(beside, mode)  # safetensors makes a file that others cannot read
        _to_disk(beside)
        os.replace(beside, path)
        _to_disk(os.path.dirname(path))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def _save(data: dict[str, Tensor], path: str, text: str) -> None:
    if "__metadata__" in data:
        raise Misfit("safetensors keeps this name for itself", "__metadata__", "give the tensor another name")
    try:
        save_file(data, path, {_KEY: text})
    except KeyError as error:
        raise Misfit(f"safetensors knows no {error}", "the tensors", "store them as another dtype") from None
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from None


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Archive]:
    contents = _contents(_metadata(os.fspath(path)))
    try:
        file = safetensors.safe_open(os.fspath(path), "pt")
    except safetensors.SafetensorError as error:
        raise Misfit(f"not a whole safetensors file: {error}", "its header") from None
    with file:
        yield Archive(file, contents)


def is_ours(path: str) -> bool:
    """Whether `write` made this file, as far as its header says so."""
    try:
        metadata = _metadata(path)
    except Misfit:
        return False
    return isinstance(metadata, dict) and _KEY in metadata


def _metadata(path: str) -> Any:
    """What stands in the header beside the tensors. safetensors would let names come twice."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise Misfit("not a whole safetensors file: it is too short for its header", "its header")
        header = _parse(file.read(length), "its header")
    return header.get("__metadata__") if isinstance(header, dict) else None


def _contents(metadata: Any) -> dict[str, Any]:
    if not isinstance(metadata, dict) or not isinstance(text := metadata.get(_KEY), str):
        remedy = "load weights without a plan by model.load_state_dict(safetensors.torch.load_file(path))"
        raise Misfit("not written by squeeze_release.save", "its header", remedy)
    contents = _parse(text, "its JSON")
    version = contents.get("format") if isinstance(contents, dict) else None
    if type(version) is int and version != FORMAT:
        by = f" of squeeze-release {contents['package']}" if isinstance(contents.get("package"), str) else ""
        what = f"written in format {version}{by:.60}; this version reads format {FORMAT}"
        raise Misfit(what, "its JSON", "load it with the version that wrote it, or one that is newer")
    if not _has_form(contents, _FORM):
        raise Misfit("the description of the network has another form than save gives it", "its JSON")
    if contents.pop("sha256") != _digest(contents):
        raise Misfit("the description of the network is not the one that was saved", "its JSON")
    return contents  # type: ignore[no-any-return]


def _parse(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, digits without end, brackets without end
        raise Misfit(f"not JSON: {type(error).__name__}: {error!s:.80}", where) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        raise ValueError("a name comes twice")
    return dict(pairs)


def _has_form(value: Any, form: Any) -> bool:
    if isinstance(form, list):
        return type(value) is list and all(_has_form(each, form[0]) for each in value)
    if isinstance(form, dict) and str in form:
        return type(value) is dict and all(_has_form(each, form[str]) for each in value.values())
    if isinstance(form, dict):
        return type(value) is dict and value.keys() == form.keys() and all(_has_form(value[k], form[k]) for k in form)
    return form is object or type(value) is form


def _own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous on the CPU, in memory that is no other tensor's: safetensors writes nothing else."""
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    seen: set[int] = set()
    for name, tensor in flat.items():
        memory = tensor.untyped_storage()
        if memory.nbytes() != tensor.nbytes or memory.data_ptr() in seen:
            flat[name] = tensor.clone()
        seen.add(memory.data_ptr())
    return flat


def _to_disk(path: str) -> None:
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _line(text: str) -> str:
    """For a message: names in a file may be long, or have line breaks in them."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def _digest(contents: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _checksum(tensor: Tensor) -> int:
    said = zlib.crc32(f"{tensor.dtype} {[*tensor.shape]}".encode())
    if not tensor.numel():
        return said
    return zlib.crc32((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()), said)


def _is_channels_last(tensor: Tensor) -> bool:
    layout, plain = _CHANNELS_LAST.get(tensor.dim()), torch.empty(tensor.shape, device="meta").stride()
    # Not by is_contiguous alone: a depthwise weight is contiguous either way, and its strides still choose the kernel.
    return layout is not None and tensor.stride() != plain and tensor.is_contiguous(memory_format=layout)
