"""The attentions of a model, by the names of their projections."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from leaves import Leaf
from torch import Tensor, nn

_Q = r"q|q_proj|query|q_lin|to_q|wq"
_K = r"k|k_proj|key|k_lin|to_k|wk"
_V = r"v|v_proj|value|v_lin|to_v|wv"
_PACKED = r"qkv|qkv_proj|Wqkv|c_attn|kv|kv_proj|to_qkv|qk|qv|attn_qkv"
PROJECTION = re.compile(rf"^({_Q}|{_K}|{_V}|{_PACKED})$")
_OUT = ("proj", "out_proj", "o_proj", "c_proj", "out_lin", "to_out", "wo", "o", "dense", "projection", "merge")
# Code that takes the width of the stream for the width of all heads together.
_DERIVES = re.compile(r"C\s*//\s*(self\.)?num_heads|(reshape|view)\(\s*B\w*,\s*[\w\-*\s]+,\s*C\s*\)")
_WRAPPER = re.compile(r"\.(conv|c|linear|fn)$")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")


@dataclass
class Attention:
    """The projections of one attention, by leaf."""

    name: str
    kind: str
    heads: int
    kv_heads: int
    width: int  # of all heads together
    qk_size: int  # of one head, of q and k
    q: str = ""
    k: str = ""
    v: str = ""
    out: str = ""
    normed: bool = False
    over_channels: bool = False  # it is channels that attend to channels
    derived: bool = False  # the code takes the stream to be as wide as all heads together
    mixed: bool = False  # heads are mixed, with a bias: weights of a row sum to what depends on the number of tokens
    bound: bool = False  # the first layer's table of positions serves all layers: heads go in all of them

    @property
    def size(self) -> int:
        return self.width // self.heads

    @property
    def packed(self) -> bool:
        return self.v != "" and self.v in (self.q, self.k)

    def place(self, rows: dict[str, Tensor], by_head: bool) -> dict[str, Tensor]:
        """Rows of q, k or v, in the leaf that holds them."""
        placed: dict[str, Tensor] = {}
        for part, mask in rows.items():
            leaf = getattr(self, part)
            mates = [p for p in "qkv" if getattr(self, p) == leaf]
            pieces = [mask if p == part else torch.zeros_like(mask) for p in mates]
            if by_head:
                heads = self.heads if len(mates) == 3 else self.kv_heads
                whole = torch.stack([piece.view(heads, -1) for piece in pieces], 1).flatten()
            else:
                whole = torch.cat(pieces)
            placed[leaf] = placed.get(leaf, torch.zeros_like(whole)) | whole
        return placed


def role(leaf: str) -> str:
    """The name under which its owner knows a layer: a convolution may come with a norm, in a module of their own."""
    return _WRAPPER.sub("", leaf).rpartition(".")[2]


def find_attentions(model: nn.Module, leaves: dict[str, Leaf]) -> list[Attention]:
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            found.append(
                Attention(name, "module", module.num_heads, module.num_heads, module.embed_dim, module.head_dim)
            )
            continue
        own = {role(n): n for n in leaves if _WRAPPER.sub("", n).rpartition(".")[0] == name}
        attention = _attention(name, module, own, leaves, getattr(model, "config", None))
        if attention:
            found.append(attention)
    return found


def _attention(
    name: str, module: nn.Module, own: dict[str, str], leaves: dict[str, Leaf], config: object
) -> Attention | None:
    heads = next((int(getattr(module, a)) for a in _HEADS if isinstance(getattr(module, a, None), int)), 0)
    settings = getattr(module, "config", config)
    if not heads:
        heads = next((int(getattr(settings, a)) for a in _HEADS if isinstance(getattr(settings, a, None), int)), 0)
    parts = {}
    for part, pattern in (("q", _Q), ("k", _K), ("v", _V)):
        packed = rf"({_PACKED})"
        exact = [n for o, n in own.items() if re.fullmatch(pattern, o)]
        both = [n for o, n in own.items() if re.fullmatch(packed, o) and (part in o or o == "c_attn")]
        parts[part] = (exact or both or [""])[0]
    if not heads or not parts["v"]:
        return None
    beside = f"{name.rpartition('.')[0]}.output.dense"  # BERT
    siblings = own if any(o in own for o in _OUT) else {"dense": beside if beside in leaves else ""}
    out = next((siblings[o] for o in _OUT if siblings.get(o)), "")
    sharing = [p for p in "qkv" if parts[p] == parts["v"]]
    value_width, rest = divmod(leaves[parts["v"]].outputs, len(sharing))
    width = leaves[out].inputs if out else value_width
    if rest or width % heads or value_width % (width // heads):
        return None
    if len(sharing) > 1 and value_width != width:  # q, k and v are not equally wide: where each begins is not known
        parts, value_width = dict.fromkeys("qkv", ""), width
    norms = [getattr(module, a, None) for a in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")]
    normed = any(isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity) for norm in norms)
    kv_heads = value_width // (width // heads)
    qk_size = width // heads
    if parts["k"] and parts["k"] not in (parts["q"], parts["v"]):  # may differ from v where it has a layer of its own
        qk_size = leaves[parts["k"]].outputs // kv_heads
        if not parts["q"] or leaves[parts["q"]].outputs != heads * qk_size:
            parts["k"] = ""
    derived = _DERIVES.search(_code(type(module).forward)) is not None
    over_channels = re.search("XCA|CrossCov|Channel", type(module).__name__) is not None
    found = Attention(name, "leaves", heads, kv_heads, width, qk_size, **parts, out=out, normed=normed, derived=derived)
    mixed = any(leaves[n].inputs == leaves[n].outputs == heads for n in own.values() if leaves[n].kind == "affine")
    bound = hasattr(module, "has_relative_attention_bias")
    return replace(found, over_channels=over_channels, mixed=mixed, bound=bound)


def _code(function: Any) -> str:
    """The source of a function, and of the functions it calls by name."""
    called = [function.__globals__.get(name) for name in function.__code__.co_names]
    functions = [function, *(f for f in called if isinstance(f, FunctionType) and "attention" in f.__name__)]
    return "".join(inspect.getsource(f) for f in functions)


def is_rotary(model: nn.Module) -> bool:
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_buffers()]
    return any(re.search("rope|rotary|inv_freq", name, re.IGNORECASE) for name in names)
