"""Model + one call -> a graph of aten ops, its parameters by name, and the module that made each call.

The trace is static: it is only read, never run, and no width depends on the batch size. (Verification runs other
batches and resolutions in eager.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..copies import hollow_on_cpu
from ..errors import ExportError, InputError, SqueezeError
from ..modules import NarrowMultiheadAttention
from ..rehearse import Call, on_cpu
from .caches import nothing_kept, without_cache
from .decisions import Decided, Decisions
from .einsum import EinsumAsMatmul
from .norms import as_one_op

_FUNCTIONALISE: dict[Any, Any] = {}  # an empty table: make the graph functional, decompose nothing


@dataclass
class ModuleCall:
    """How one module was called in an eager run."""

    count: int = 0
    shape_in: tuple[int, ...] | None = None
    shape_out: tuple[int, ...] | None = None
    alone: bool = True  # no other tensor of the first one's shape comes in with it
    outputs: int = 0  # 0: a tensor; n: a tuple of n with a tensor first and nothing but None after it


@dataclass(eq=False)
class Trace:
    """One traced call."""

    nodes: list[fx.Node]
    params: dict[str, str]  # placeholder -> dotted name of a parameter or buffer
    calls: dict[str, ModuleCall]
    constants: dict[str, Tensor]  # placeholder -> a tensor that the code makes itself
    paths: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    call: Call = ((), {})

    def module_of(self, node: fx.Node) -> str:
        return self.paths[node][-1] if self.paths.get(node) else ""

    def param_of(self, node: fx.Node, argument: str) -> str | None:
        source = named_arguments(node).get(argument)
        return self.params.get(source.name) if isinstance(source, fx.Node) else None


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments under their schema names, defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {**{str(i): a for i, a in enumerate(node.args)}, **node.kwargs}
    named: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args):
            named[argument.name] = node.args[i]
        elif argument.name in node.kwargs:
            named[argument.name] = node.kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value if argument.has_default_value() else None
    return named


def as_calls(example_inputs: Any, kwargs: dict[str, Any] | None) -> list[Call]:
    """A tensor, a tuple of arguments, or a list of such calls -> (args, kwargs) pairs."""
    calls = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    if not calls:
        raise InputError(
            "example_inputs is an empty list",
            where="squeeze(model, example_inputs)",
            consequence="there is nothing to trace the model with",
            remedy="pass a tensor, a tuple of arguments, or a list of such calls",
        )
    return [(call if isinstance(call, tuple) else (call,), dict(kwargs or {})) for call in calls]


def trace(model: nn.Module, call: Call) -> Trace:
    """Run the model once in eager, then export it."""
    with traceable(model):
        with Decisions() as decisions:
            calls = _probe(model, call)
        try:
            with warnings.catch_warnings(), Decided(decisions):
                warnings.simplefilter("ignore")  # torch.export warns of itself
                program = torch.export.export(model, *call, strict=False)
                if _mutates(program.graph):
                    program = program.run_decompositions(_FUNCTIONALISE)
        except SqueezeError:
            raise
        except Exception as cause:
            raise ExportError(
                f"torch.export cannot trace this model: {_first_line(cause)}",
                where=type(model).__name__,
                consequence="nothing was changed; without a trace no channel can be shown to be removable",
                remedy="make torch.export.export(model.eval(), args, strict=False) work (data-dependent branches are "
                "the usual cause), or squeeze the part of the model that exports",
            ) from cause
    signature = program.graph_signature
    params = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    made = {name: program.constants[target] for name, target in signature.inputs_to_lifted_tensor_constants.items()}
    known = {
        name
        for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    }
    _drop_unused_weights(program.graph, model)
    nodes = list(program.graph.nodes)
    first: dict[int, str] = {}  # a module may have several names: it goes by the first
    names = {name: first.setdefault(id(module), name) for name, module in model.named_modules(remove_duplicate=False)}
    paths = {node: tuple(names.get(path, path) for path in _paths(node)) for node in nodes}
    return Trace(nodes, {k: v for k, v in params.items() if v in known}, calls, made, paths, call)


def rehearse(model: nn.Module, call: Call) -> None:
    """The eager run on the CPU, where whatever fails is an InputError."""
    twin = hollow_on_cpu(model)
    with traceable(twin):
        _probe(twin, on_cpu(call))


def _drop_unused_weights(graph: fx.Graph, model: nn.Module) -> None:
    """nn.MultiheadAttention computes weights that nobody may ask for. Its stand-in does not look at them either."""
    ours = {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (nn.MultiheadAttention, NarrowMultiheadAttention))
    }
    for node in reversed(graph.nodes):
        unused = node.op == "call_function" and not node.users and not _writes(node)
        if unused and _paths(node)[-1:] and _paths(node)[-1] in ours:
            graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or bool(schema.is_mutable)


@contextmanager
def traceable(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, norms and einsums as ops with rules, fused attention if one can choose; undone after."""
    with ExitStack() as undo:
        undo.enter_context(torch.no_grad())
        undo.enter_context(without_cache(model))
        undo.enter_context(EinsumAsMatmul())
        undo.enter_context(_without_autocast())
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
            if getattr(module, "fused_attn", None) is False:
                undo.callback(setattr, module, "fused_attn", False)
                module.fused_attn = True  # type: ignore[assignment]
            undo.enter_context(as_one_op(module))
        model.eval()
        fast = torch.backends.mha.get_fastpath_enabled()
        undo.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


@contextmanager
def _without_autocast() -> Iterator[None]:
    """torch.export hides what a forward does under `torch.autocast` in a graph of its own; channels do not care."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]
    torch.autocast.__exit__ = lambda self, *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]


def _probe(model: nn.Module, call: Call) -> dict[str, ModuleCall]:
    """One eager run: do the inputs fit, and how is every module called?"""
    calls = {name: ModuleCall() for name, _ in model.named_modules()}
    handles = []
    entered: list[str] = []

    def watch(name: str, module: nn.Module) -> None:
        def enter(*_: object) -> None:
            entered.append(name)

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            entered.pop()
            seen = calls[name]
            seen.count += 1
            seen.shape_in = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else None
            others = [t for t in pytree.tree_leaves((args[1:], kwargs)) if isinstance(t, Tensor)]
            seen.alone = all(tuple(t.shape) != seen.shape_in for t in others)
            if isinstance(output, tuple) and output and not any(rest is not None for rest in output[1:]):
                seen.outputs, output = len(output), output[0]
            seen.shape_out = tuple(output.shape) if isinstance(output, Tensor) else None

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(record, with_kwargs=True))

    for name, module in model.named_modules():
        watch(name, module)
    try:
        with nothing_kept(model):
            model(*call[0], **call[1])
    except Exception as cause:
        error = InputError(
            f"the model cannot run on the example inputs: {_first_line(cause)}",
            where=f"{type(model).__name__}({_shapes(call)}), in {(entered and entered[-1]) or 'its own forward'}",
            consequence="nothing was changed",
            remedy="pass inputs with which model(*example_inputs, **kwargs) works",
        )
        error.module = entered[-1] if entered else ""
        error.progress = sum(seen.count for seen in calls.values())
        raise error from cause
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _shapes(call: Call) -> str:
    def show(value: Any) -> str:
        return (
            f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )

    return ", ".join([show(a) for a in pytree.tree_leaves(call[0])] + [f"{k}={show(v)}" for k, v in call[1].items()])


def _first_line(cause: Exception) -> str:
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0] if str(cause).strip() else ''}"


def _paths(node: fx.Node) -> tuple[str, ...]:
    """Dotted paths of the modules around a node, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(path.split("@")[0] for path, _ in stack.values() if path)


def _mutates(graph: fx.Graph) -> bool:
    """Whether an in-place op writes to something that is read again under its old name."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        written = node.args[0]
        if not isinstance(written, fx.Node) or _views(written) or any(order[u] > order[node] for u in written.users):
            return True
    return False


def _views(node: fx.Node) -> bool:
    """Whether a tensor may share its memory with another one in the graph."""
    if node.op != "call_function":
        return True
    family = [node, *node.users]
    return any(_is_view(each) for each in family)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.op == "call_function"
    if schema.is_mutable:
        return False
    return any(argument.alias_info is not None for argument in schema.arguments) or node.target in (
        torch.ops.aten.reshape.default,
        torch.ops.aten.contiguous.default,
        torch.ops.aten.flatten.using_ints,
        torch.ops.aten.dropout.default,
        torch.ops.aten.to.dtype,
    )
