"""Dead units planted at random in any model, and the parameters they hold. Knows nothing of the analysis under test.

    plants = plant(model, call, seed)      # `model` now has dead channels, heads, dimensions and blocks
    plants.masks                           # parameter -> which of its entries belong to something dead

The planter sees names, classes and shapes of modules. It

- puts noise into norms, biases and statistics, so that no constant is 0 or 1 by accident;
- kills, for every width C of the model, a quarter of the channels: rows of each Linear and convolution with C outputs,
  columns of embeddings, entries of position embeddings. What is read at its own width dies as a whole stream; biases
  stay, so the dead channel is a constant. Where a norm writes the stream its scale goes to 0; a norm that is only read
  keeps its scale with every even seed, so that the constants go through it;
- kills inputs on the reader's side, heads, the same v and qk dimensions in every head, and whole blocks.

Much of that is not dead after all: a stream that one writer still feeds, a q that does not meet its k. `observe` runs
the model, what is not dead is undone, and this is repeated until all that was planted is dead.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

import torch
from attentions import PROJECTION, Attention, find_attentions, is_rotary, role
from blocks import blame, choose_blocks, keep_width, read_in_pieces
from heads import Group, Heads
from noise import add_noise, calibrate, scale_at_rest
from observe import Call, Observation, observe
from streams import stream_writers
from torch import Tensor, nn

SHARE = 0.25
SMALLEST_WIDTH = 8
ROUNDS = 10

_INNER = re.compile(
    r"(fc1|conv1|conv_pw|conv_dw|w1|w12|gate_proj|up_proj|intermediate\.dense|lin1|c_fc|wi|fc_in|pwconv1)$"
)
_TOKEN = re.compile(r"cls|class_emb|token|dist|reg", re.IGNORECASE)
_NOTHING = torch.zeros(1, dtype=torch.bool)
# Channel shuffle interleaves a fixed half with a new one: no set of stream channels is closed under that, so nothing
# that writes or reads the stream dies there.
_SHUFFLED = re.compile(r"ShuffleNet")
_SHUFFLED_WRITERS = re.compile(r"branch1\.2|branch2\.5")
_SHUFFLED_READERS = re.compile(r"branch1\.|branch2\.0|conv5")


@dataclass
class Plants:
    """What was planted, and what it holds."""

    masks: dict[str, Tensor]
    kinds: list[str]

    @property
    def count(self) -> int:
        return sum(int(mask.sum()) for mask in self.masks.values())


def plant(model: nn.Module, call: Call, seed: int, many: Call | None = None) -> Plants:
    """Kill units of a float64 model in place. `many` samples, if there are, tell batch norms what to expect."""
    generator = torch.Generator().manual_seed(seed)
    add_noise(model, generator)
    calibrate(model, many or call, generator)
    base = observe(model, call)
    masked = any("mask" in name for name in call[1])
    garden = Garden(model, base, generator, zero_read_norms=seed % 2 == 1, masked=masked)
    streams = stream_writers(model, call, garden.leaves)
    plants = garden.harvest(base, garden.grow(call), streams)
    calibrate(model, many or call, generator)  # with what died, the data changed
    return plants


class Garden:
    """The plants of one model: what is zero now, by leaf or parameter, and the weights as they were."""

    def __init__(
        self, model: nn.Module, base: Observation, generator: torch.Generator, zero_read_norms: bool, masked: bool
    ) -> None:
        self.model, self.leaves, self.generator = model, {n: base.leaves[n] for n in base.live_out}, generator
        self.norms = {n for n in self.leaves if self.leaves[n].kind == "norm"}
        self.zeroed_norms = self.norms if zero_read_norms else base.writer_norms
        self.writer_norms = base.writer_norms
        self.original = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.buffers = {name: tensor.detach().clone() for name, tensor in model.named_buffers()}
        self.rows: dict[str, Tensor] = {}
        self.columns: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}  # of norms that write: 0 wherever they read a constant
        self.entries: dict[str, Tensor] = {}
        self.groups: list[Group] = []
        self.silent: set[str] = set()  # leaves whose dead rows have no bias either
        self.explicit: dict[str, Tensor] = {}
        self.chunks = self._chunks()
        self.attentions = find_attentions(model, self.leaves)
        self.even = keep_width(model)
        self.heads = Heads(generator, SHARE, is_rotary(model), masked)
        # Where heads and stream are one width, both lose the same share or neither loses anything.
        derived = [found for found in self.attentions if found.derived]
        self.zeroed_norms = self.norms if derived else self.zeroed_norms  # carriers would make the stream wider
        rigid = {found.width for found in derived if not self.heads.keeps_pace(found)}
        self.dead = {width: self.choose(width) for width in self._widths() - rigid}
        for width, piece in sorted(read_in_pieces(self.leaves).items()):
            if width in self.dead and piece in self.dead:
                self.dead[width] = self.dead[piece].repeat(width // piece)
        self.alive_before = {n for n in self.leaves if base.lives(n)}
        tokens = [p for n, p in self.original.items() if n in base.free_live and _TOKEN.search(n)]
        self.token_widths = {p.size(-1) for p in tokens if p.dim()}
        self._plant_channels(base)
        self._silence(self.token_widths, only_patches=True)
        self._plant_attention()
        self._plant_readers()
        shuffled = _SHUFFLED.search(type(model).__name__)
        self.stacks = [] if shuffled else choose_blocks(model, self.leaves, generator)

    @property
    def blocks(self) -> dict[str, list[str]]:
        """The blocks to be dead: one of each stack."""
        return dict(next(iter(stack.items())) for stack in self.stacks if stack)

    # ------------------------------------------------------------------------------------------------- which channels

    def _widths(self) -> set[int]:
        return {
            leaf.outputs
            for name, leaf in self.leaves.items()
            if leaf.kind in ("affine", "channelwise", "table") and leaf.outputs >= SMALLEST_WIDTH
        }

    def _chunks(self) -> dict[int, int]:
        """Width -> pieces that lose equally many channels each: groups of convolutions and norms, halves of a gate."""
        pieces: dict[int, int] = {}
        for leaf in self.leaves.values():
            groups = leaf.groups if leaf.kind == "affine" else int(getattr(leaf.module, "num_groups", 1))
            for width in {leaf.outputs, int(getattr(leaf.module, "in_channels", leaf.outputs))}:
                if groups > 1:
                    pieces[width] = math.lcm(pieces.get(width, 1), groups)
        return pieces

    def choose(self, width: int, share: float = SHARE) -> Tensor:
        """A random share of the channels, at the same places of every chunk, or whole chunks where these are narrow."""
        chunks = self.chunks.get(width, 1)
        if width % 16 == 0:
            chunks = math.lcm(chunks, 4)
        if width % chunks:
            chunks = 1
        inner = width // chunks
        if inner >= 4:
            picked = torch.randperm(inner, generator=self.generator)[: max(1, int(inner * share))]
            return torch.zeros(chunks, inner, dtype=torch.bool).index_fill(1, picked, True).flatten()
        picked = torch.randperm(chunks, generator=self.generator)[: max(1, int(chunks * share))]
        return torch.zeros(chunks, inner, dtype=torch.bool).index_fill(0, picked, True).flatten()

    # ---------------------------------------------------------------------------------------------------------- plant

    def _plant_channels(self, base: Observation) -> None:
        for name, leaf in self.leaves.items():
            if leaf.kind in ("affine", "channelwise", "table", "attention") and leaf.weight.dim() > 1:
                free = not PROJECTION.match(role(name)) and not self._shuffled(name, _SHUFFLED_WRITERS)
                if free and leaf.outputs in self.dead:
                    self.rows[name] = self.dead[leaf.outputs].clone()
            elif name in self.zeroed_norms and leaf.outputs in self.dead:
                self.scales[name] = self.dead[leaf.outputs].clone()
        for name in base.free_live:
            mask = self._along_width(self.original[name], name)
            if mask is not None:
                self.entries[name] = mask
        for name, buffer in self.buffers.items():
            mask = self._along_width(buffer) if buffer.is_floating_point() and "pos" in name else None
            if mask is not None:
                self.entries[name] = mask

    def _shuffled(self, name: str, which: re.Pattern[str]) -> bool:
        return bool(_SHUFFLED.search(type(self.model).__name__) and which.search(name))

    def _silence(self, widths: set[int], only_patches: bool = False) -> bool:
        """A class token that joins the stream brings 0: so must all others. Whether this is news."""
        before = len(self.silent)
        for name, leaf in self.leaves.items():
            patches = isinstance(leaf.module, nn.Conv2d) and leaf.module.stride == leaf.module.kernel_size != (1, 1)
            if leaf.kind != "norm" and leaf.outputs in widths and (patches or not only_patches):
                self.silent.add(name)
        return len(self.silent) > before

    def _along_width(self, tensor: Tensor, name: str = "") -> Tensor | None:
        """Entries of a position or class embedding that belong to dead channels."""
        for dim in (tensor.dim() - 1, 1):
            if (tensor.dim() >= 2 or (tensor.dim() == 1 and dim == 0 and _TOKEN.search(name))) and tensor.size(
                dim
            ) in self.dead:
                shape = [1] * tensor.dim()
                shape[dim] = -1
                return self.dead[tensor.size(dim)].view(shape).expand(tensor.shape).clone()
        return None

    def _plant_attention(self) -> None:
        for number, found in enumerate(self.attentions):
            if found.kind == "module":
                self._plant_multihead(found)
                continue
            if found.out and found.kv_heads > 1 and not found.derived:  # else a head less would make the others wider
                head = self.heads.head(found, by_value=number % 2 == 1)
                if isinstance(head, Group):
                    self.groups.append(head)
                else:
                    self.columns[found.out] = head
            if found.derived and found.width not in self.dead:
                continue
            if self.heads.free_dimensions(found):
                self.groups += self.heads.dimensions(found, zero_q=number % 2 == 1)
            elif found.derived and found.out:
                self.columns[found.out] = self.heads.quarter(found)

    def _plant_multihead(self, found: Attention) -> None:
        """nn.MultiheadAttention runs as one: what a head of it holds is known without looking."""
        module = self.model.get_submodule(found.name)
        assert isinstance(module, nn.MultiheadAttention)
        width, size = module.embed_dim, module.head_dim
        head = int(torch.randint(module.num_heads, (), generator=self.generator))
        mine = torch.zeros(width, dtype=torch.bool)
        mine[head * size : (head + 1) * size] = True
        columns = mine[None].expand(width, width)
        self.entries[f"{found.name}.out_proj.weight"] = self.explicit[f"{found.name}.out_proj.weight"] = columns.clone()
        if module.in_proj_weight is not None:
            self.explicit[f"{found.name}.in_proj_weight"] = mine.repeat(3)[:, None].expand(3 * width, width).clone()
            self.explicit[f"{found.name}.in_proj_bias"] = mine.repeat(3)

    def _plant_readers(self) -> None:
        outs = {found.out for found in self.attentions}
        for name, leaf in self.leaves.items():
            inputs = leaf.inputs if leaf.kind == "affine" else 0
            chosen = float(torch.rand((), generator=self.generator)) < 0.5
            if inputs >= SMALLEST_WIDTH and name not in outs and chosen and not self._shuffled(name, _SHUFFLED_READERS):
                self.columns[name] = self.choose(inputs, SHARE / 2) & ~self.dead.get(inputs, torch.zeros(inputs).bool())

    # ----------------------------------------------------------------------------------------------- apply and undo

    @torch.no_grad()
    def apply(self) -> None:
        """The original weights, with zeros where something is planted."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, value in {**self.original, **{n: self.buffers[n] for n in self.entries if n in self.buffers}}.items():
            tensors[name].copy_(value)
        for name, rows in self.rows.items():
            self._weight(name).movedim(self.leaves[name].rows, 0)[rows] = 0
            bias = getattr(self.leaves[name].module, "bias", None)
            if name in self.silent and isinstance(bias, Tensor):
                bias[rows] = 0
        for group in self.groups:
            for name, rows in group.zero.items():
                self._weight(name).movedim(self.leaves[name].rows, 0)[rows] = 0
                bias = getattr(self.leaves[name].module, "bias", None)
                if group.bias_too and isinstance(bias, Tensor):
                    bias[rows] = 0
            for part, rows in group.parts.items() if group.bias_too else ():
                if f"{group.attention.name}.{part}_bias" in tensors:
                    tensors[f"{group.attention.name}.{part}_bias"][rows] = 0
        for name, columns in self.columns.items():
            self._weight(name)[self.leaves[name].columns(columns)] = 0
        for last in self.blocks.values():
            for name in last:
                self._weight(name).zero_()
        for name, scale in self.scales.items():
            self._weight(name)[scale] = scale_at_rest(self.model, f"{name}.weight")
        for name, mask in self.entries.items():
            tensors[name][mask] = 0

    def _weight(self, name: str) -> Tensor:
        return self.leaves[name].weight.detach()

    def grow(self, call: Call) -> Observation:
        for _ in range(ROUNDS):
            self.apply()
            seen = observe(self.model, call, self.writer_norms)
            if not self._weed(seen):
                break
        return seen

    def _weed(self, seen: Observation) -> bool:
        """Undo what is not dead; whether anything was undone."""
        bad_blocks = blame(self.blocks, [n for n in self.alive_before if not seen.lives(n)])
        if bad_blocks:
            for stack, block in itertools.product(self.stacks, bad_blocks):
                stack.pop(block, None)
            return True
        live = {self.leaves[n].outputs for n, rows in self.rows.items() if bool((rows & seen.live_out[n]).any())}
        if live & self.token_widths and self._silence(self.token_widths):
            return True
        changed = False
        for kept, dead in (
            (self.rows, self._dead_rows(seen)),
            (self.columns, seen.dead_in),
            (self.entries, {n: ~live for n, live in seen.free_live.items()}),
        ):
            for name, mask in list(kept.items()):
                if name in dead and bool((mask & ~dead[name]).any()):
                    kept[name] = mask & dead[name]
                    changed = True
        scales = {n: seen.constant_in[n] for n in self.zeroed_norms if bool(seen.constant_in[n].any())}
        changed |= any(not torch.equal(self.scales.get(n, ~mask), mask) for n, mask in scales.items())
        self.scales = scales
        for group in [g for g in self.groups if not self._is_dead(g, seen)]:
            self.groups.remove(group)
            self.groups += [group.otherwise] if group.otherwise else []
            changed = True
        return changed or self._drop_halves(seen) or self._drop_uneven(seen)

    def _drop_uneven(self, seen: Observation) -> bool:
        """Where code lays out at the width of what comes in, no writer inside loses what the stream in front keeps."""
        changed = False
        for block in self.even:
            inside = [n for n in self.leaves if n.startswith(f"{block}.")]
            width = self.leaves[inside[0]].inputs if inside and inside[0] in seen.dead_in else 0
            if width in self.dead and not bool(seen.dead_in[inside[0]][self.dead[width]].all()):
                uneven = [n for n in inside if n in self.rows and self.leaves[n].outputs == width]
                changed |= any([bool(self.rows.pop(name).any()) for name in uneven])
        return changed

    def _drop_halves(self, seen: Observation) -> bool:
        """Dimensions go from q, k and v alike; where heads and stream are one width, from all of these."""
        kinds: dict[str, set[str]] = {}
        for group in self.groups:
            kinds.setdefault(group.attention.name, set()).add(group.kind)
        whole = {found.name for found in self.attentions if {"v", "qk"} <= kinds.get(found.name, set())}
        quartered = {f.name for f in self.attentions if f.derived and bool(self.columns.get(f.out, _NOTHING).any())}
        widths = {
            found.width
            for found in self.attentions
            if found.derived
            and found.width in self.dead
            and not (found.name in whole | quartered and self._is_dead_stream(found, seen))
        }
        kept = [g for g in self.groups if not g.tied or (g.attention.name in whole and g.attention.width not in widths)]
        changed = len(kept) < len(self.groups) or bool(widths)
        self.groups = kept
        for width in widths:
            self.rows = {n: rows for n, rows in self.rows.items() if self.leaves[n].outputs != width}
            del self.dead[width]
            for out in [found.out for found in self.attentions if found.derived and found.width == width]:
                self.columns.pop(out, None)  # a quarter of the heads goes with the stream or not at all
        return changed

    def _is_dead_stream(self, found: Attention, seen: Observation) -> bool:
        dead = [seen.dead_in[leaf] for leaf in (found.v, found.q, found.k) if leaf in seen.dead_in]
        return any(len(d) == found.width and bool(d[self.dead[found.width]].all()) for d in dead)

    def _dead_rows(self, seen: Observation) -> dict[str, Tensor]:
        """Of leaves that share a weight, what is dead in all."""
        alike: dict[int, list[str]] = {}
        for name, leaf in self.leaves.items():
            if leaf.kind != "recurrent":
                alike.setdefault(id(leaf.weight) + leaf.rows, []).append(name)
        return {n: ~torch.stack([seen.live_out[m] for m in mates]).any(0) for mates in alike.values() for n in mates}

    def _is_dead(self, group: Group, seen: Observation) -> bool:
        rows = group.unread or group.zero
        return not any(bool((seen.live_out[name] & mask).any()) for name, mask in rows.items())

    # -------------------------------------------------------------------------------------------------------- harvest

    def harvest(self, base: Observation, seen: Observation, streams: set[str]) -> Plants:
        masks, before = seen.masks(), base.masks()
        for group in self.groups:
            for name, rows in group.zero.items():
                leaf = self.leaves[name]
                shape = [1] * leaf.weight.dim()
                shape[leaf.rows] = -1
                masks[f"{name}.weight"] = masks[f"{name}.weight"] | rows.view(shape)
                if f"{name}.bias" in masks:
                    masks[f"{name}.bias"] = masks[f"{name}.bias"] | rows
        for name, mask in self.explicit.items():
            masks[name] = masks.get(name, torch.zeros_like(mask)) | mask
        masks = {name: mask & ~before[name] if name in before else mask for name, mask in masks.items()}
        # tied parameters have one entry each, under the name that comes first
        first = {id(p): name for name, p in reversed(list(self.model.named_parameters(remove_duplicate=False)))}
        tied = {name: first[id(p)] for name, p in self.model.named_parameters(remove_duplicate=False)}
        total: dict[str, Tensor] = {}
        for name, mask in masks.items():
            if name in tied:  # what several share is dead where all of them say so
                total[tied[name]] = total[tied[name]] & mask if tied[name] in total else mask
        return Plants({name: mask for name, mask in total.items() if bool(mask.any())}, self._kinds(seen, streams))

    def _kinds(self, seen: Observation, streams: set[str]) -> list[str]:
        """Truthfully: channels that layers no longer write (`inner`, `stream`) or read (`read`), and the rest.

        A block in front of whose last layers something lives lost a branch.
        """
        written = [name for name, rows in self.rows.items() if bool(rows.any())]
        kinds = {"stream" if name in streams and not _INNER.search(name) else "inner" for name in written}
        kinds |= {group.kind for group in self.groups}
        columns = [name for name, columns in self.columns.items() if bool(columns.any())]
        kinds |= {"head" if name in {found.out for found in self.attentions} else "read" for name in columns}
        for block, last in self.blocks.items():
            inside = [n for n, leaf in self.leaves.items() if n.startswith(f"{block}.") and leaf.kind == "affine"]
            kinds.add("branch" if any(bool(seen.live_out[n].any()) for n in {*inside} - {*last}) else "block")
        return sorted(kinds | ({"head"} if self.explicit else set()))
