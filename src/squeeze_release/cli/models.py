"""MODEL: `timm:NAME`, `torchvision:NAME`, `transformers:CONFIG_DIR` or `package.module:function`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl

import typer
from torch import nn

from ..errors import InputError

HELP = (
    "timm:convnext_tiny?num_classes=10, torchvision:resnet18, transformers:CONFIG_DIR, "
    "or package.module:function, which returns the model"
)


def build(text: str) -> nn.Module:
    """The full-size model with random weights. Nothing is downloaded."""
    source, colon, rest = text.partition(":")
    name, _, query = rest.partition("?")
    if not (source and colon and name):
        raise typer.BadParameter(f"{text!r} names no model; use {HELP}", param_hint="MODEL")
    arguments = {key: _value(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    maker = _MAKERS.get(source)
    try:
        made = _own(source, name, arguments) if maker is None else maker(name, arguments)
    except ImportError as error:
        remedy = "install what is missing, or correct the name"
        raise _no_model(f"{source} cannot be imported: {error}", text, remedy) from error
    except InputError:
        raise
    except Exception as error:
        raise _no_model(f"{type(error).__name__}: {error}", text, "correct the name or its arguments") from error
    if not isinstance(made, nn.Module):
        raise _no_model(f"it gave a {type(made).__name__}, not a torch.nn.Module", text, "return the model")
    return made


def complete(incomplete: str) -> Iterator[str]:
    """For the shell: prefixes, and behind them the names that the library knows."""
    source, colon, _ = incomplete.partition(":")
    names = _NAMES.get(source) if colon else None
    if names is None:
        yield from (f"{prefix}:" for prefix in _MAKERS if f"{prefix}:".startswith(incomplete))
    else:
        with contextlib.suppress(Exception):  # a library that is absent or broken has no names to offer
            yield from [full for name in names() if (full := f"{source}:{name}").startswith(incomplete)]


def _value(text: str) -> Any:
    """As JSON, or as text where it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _timm(name: str, arguments: dict[str, Any]) -> Any:
    import timm

    return timm.create_model(name, **{"pretrained": False} | arguments)


def _torchvision(name: str, arguments: dict[str, Any]) -> Any:
    from torchvision import models

    takes = inspect.signature(models.get_model_builder(name)).parameters
    nothing = {key: None for key in ("weights", "weights_backbone") if key in takes}  # else some would be downloaded
    return models.get_model(name, **nothing | arguments)


def _transformers(folder: str, arguments: dict[str, Any]) -> Any:
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise InputError(
            f"there is no config.json in {folder!r}",
            where=f"transformers:{folder}",
            consequence="no model was built; nothing is downloaded",
            remedy="name the folder that save_pretrained of the full-size model, or of its config, wrote",
        )
    import transformers

    options = arguments | {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    if not config.architectures:
        auto: Any = transformers.AutoModel
        return auto.from_config(config)
    kind = getattr(transformers, config.architectures[0], None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ValueError(f"transformers {transformers.__version__} has no model {config.architectures[0]}")
    return kind(config)


def _own(module: str, function: str, arguments: dict[str, Any]) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    made: Any = importlib.import_module(module)
    for part in function.split("."):
        made = getattr(made, part)
    return made(**arguments) if callable(made) else made


def _timm_names() -> list[str]:
    import timm

    return list(timm.list_models())


def _torchvision_names() -> list[str]:
    from torchvision import models

    return list(models.list_models())


_MAKERS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
_NAMES: dict[str, Callable[[], list[str]]] = {"timm": _timm_names, "torchvision": _torchvision_names}


def _no_model(what: str, text: str, remedy: str) -> InputError:
    return InputError(what, where=f"MODEL {text}", consequence="no model was built", remedy=remedy)
