"""From what a training script holds to the user's own module: peel wrappers, refuse what cannot be rewritten."""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import ModelError

# Torch classes are recognised by name: importing torch.distributed.fsdp or torch._dynamo for an isinstance would take
# seconds, and builds without torch.distributed do not have them at all.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "AveragedModel": "module",
}

_REFUSED = {
    "FullyShardedDataParallel": (
        "is sharded by FSDP",
        "load a full state dict (torch.distributed.checkpoint.state_dict) into the plain model and pass that",
    ),
    "FSDPModule": (
        "is sharded by fully_shard (FSDP2)",
        "load a full state dict (torch.distributed.checkpoint.state_dict) into the plain model and pass that",
    ),
    "ScriptModule": (
        "is a TorchScript module (torch.jit.script or torch.jit.trace)",
        "pass the Python module that it was made from",
    ),
}

_QUANTIZED_PACKAGES = ("torch.ao.nn.quantized", "torch.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel, torch.compile, AveragedModel or several.

    Nothing is copied or changed. Raises ModelError for what cannot be rewritten: FSDP, TorchScript, quantized and lazy
    modules, wrappers further inside the model, and parameters that are on the meta device, complex, sparse or DTensors.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module, got {_class_name(model)}",
            where="the model argument",
            consequence="there are no modules to rewrite",
            remedy="pass the model object itself (a state dict or an ExportedProgram does not hold its code)",
        )
    while (wrapper := _torch_name(model, _WRAPPERS)) is not None:
        _refuse_hooks_on_wrapper(model)
        model = getattr(model, _WRAPPERS[wrapper])
    for name, module in model.named_modules():
        _refuse_module(name or "the model itself", module)
    for name, tensor in _named_tensors(model):
        _refuse_tensor(name, tensor)
    return model


def _torch_name(module: nn.Module, names: Container[str]) -> str | None:
    """The first of `names` that is a torch class this module is an instance of."""
    for cls in type(module).__mro__:
        if cls.__name__ in names and cls.__module__.startswith("torch."):
            return cls.__name__
    return None


def _refuse_hooks_on_wrapper(wrapper: nn.Module) -> None:
    # Peeling would drop the hook, and with it a part of the function.
    if wrapper._forward_hooks or wrapper._forward_pre_hooks:
        raise ModelError(
            f"a forward hook is registered on the {type(wrapper).__name__} wrapper",
            where="the model itself",
            consequence="the hook would be lost with the wrapper",
            remedy="register the hook on the wrapped module, or remove it",
        )


def _refuse_module(name: str, module: nn.Module) -> None:
    refused = _torch_name(module, _REFUSED)
    if refused is not None:
        what, remedy = _REFUSED[refused]
        raise _cannot_rewrite(f"{_class_name(module)} {what}", name, remedy)
    wrapper = _torch_name(module, _WRAPPERS)
    # An AveragedModel that is a part of the model (a teacher, say) is an ordinary module with an ordinary forward.
    if wrapper is not None and wrapper != "AveragedModel":
        inner = f"{name}.{_WRAPPERS[wrapper]}"
        raise _cannot_rewrite(f"{wrapper} wraps a part of the model", name, f"set model.{name} = model.{inner} first")
    if type(module).__module__.startswith(_QUANTIZED_PACKAGES):
        raise _cannot_rewrite(f"{_class_name(module)} is quantized", name, "squeeze the float model, then quantize")


def _refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise _cannot_rewrite("lazy module, its shape is not known yet", name, "run the model once on an example input")
    if is_traceable_wrapper_subclass(tensor):
        remedy = "replace it by a plain tensor (DTensor: full_tensor(); torchao: squeeze first, then quantize)"
        raise _cannot_rewrite(f"stored as {_class_name(tensor)}, not as a plain tensor", name, remedy)
    if tensor.is_meta:
        raise _cannot_rewrite("on the meta device, it has no values", name, "load the weights (to_empty, then load)")
    if tensor.is_quantized:
        raise _cannot_rewrite("quantized tensor", name, "squeeze the float model, then quantize")
    if not isinstance(tensor, nn.Parameter):
        return
    if tensor.is_complex():
        raise _cannot_rewrite("complex parameter", name, "store real and imaginary part as two real parameters")
    if tensor.layout is not torch.strided:
        raise _cannot_rewrite(f"parameter in {tensor.layout} layout", name, "store it dense: to_dense()")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _cannot_rewrite(what: str, where: str, remedy: str) -> ModelError:
    return ModelError(
        what, where=where, consequence="it cannot be rewritten; the model is left as it was", remedy=remedy
    )


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
