"""Files of other models, damaged ones and forged ones: a clear error, and the model given is as it was."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import random
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stored
import torch
from check import noisy
from safetensors.torch import load_file, save_file
from stored import NETS, fc, small_fc, untouched
from torch import Tensor, nn

import squeeze_release as sr


@functools.cache
def saved(name: str) -> bytes:
    """A small network of `stored` as a file."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        sr.save(NETS[name][1](), Path(folder, "net"))
        return Path(folder, "net").read_bytes()


def refusal(model: nn.Module, path: Path) -> list[str]:
    """What, where and remedy; the model must be as it was, and the message of one form."""
    before = copy.deepcopy(model)
    with pytest.raises(sr.StoreError) as caught:
        sr.load(model, path)
    untouched(model, before)
    error, lines = caught.value, str(caught.value).splitlines()
    assert len(lines) == 4 and error.where.endswith(f", in {path}")
    assert error.consequence == "nothing was loaded; the model is as it was"
    return [error.what, error.where.removesuffix(f", in {path}"), error.remedy]


DAMAGED = "save the network again: this file is damaged"
WRONG_MODEL = "build the model with the code and the arguments that built the one which was squeezed"


def without_head() -> nn.Sequential:
    return fc()[:4]


@pytest.mark.parametrize(
    ("build", "what", "where"),
    [
        (lambda: wider(nn.Linear(4, 9), 0), "[9, 4] in this model, [8, 4] in the squeezed one", "0.weight"),
        (without_head, "nothing in this model, [3] in the squeezed one", "4.bias"),
        (lambda: fc().append(nn.Linear(3, 3)), "[3, 3] in this model, nothing in the squeezed one", "5.weight"),
        (lambda: wider(nn.GELU(), 1), "GELU in this model, ReLU in the squeezed one", "1"),
        (lambda: wider(nn.Identity(), 1), "nothing in this model, ReLU in the squeezed one", "1"),
    ],
    ids=["wider", "shorter", "longer", "another activation", "no activation"],
)
def test_another_model(build, what, where, tmp_path):
    (tmp_path / "net").write_bytes(saved("fc"))
    assert refusal(build(), tmp_path / "net") == [what, where, WRONG_MODEL]


def wider(layer: nn.Module, at: int) -> nn.Module:
    net = fc()
    net[at] = layer
    return net


def test_dropout_makes_no_other_model(tmp_path):
    net = noisy(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2)))
    sr.save(net, tmp_path / "net")
    sr.load(nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2)), tmp_path / "net")


def test_another_number_of_heads(tmp_path):
    (tmp_path / "net").write_bytes(saved("attention"))
    what, where, remedy = refusal(nn.TransformerEncoderLayer(8, 4, 12, batch_first=True), tmp_path / "net")
    assert (what, where) == ("4 in this model, 2 in the squeezed one", "self_attn.num_heads") and remedy == WRONG_MODEL


def test_another_number_of_heads_in_a_class_that_is_not_torchs(tmp_path):
    class Attention(nn.Module):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.num_heads, self.drop_rate = heads, 0.1 * heads
            self.qkv = nn.Linear(8, 24)

    sr.save(Attention(2), tmp_path / "net")
    what, where, remedy = refusal(Attention(4), tmp_path / "net")
    assert (what, where) == ("4 in this model, 2 in the squeezed one", "num_heads") and remedy == WRONG_MODEL


def test_weights_that_are_tied_only_here(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sr.save(net, tmp_path / "net")
    tied = copy.deepcopy(net)
    tied[1].weight = tied[0].weight
    what, where, remedy = refusal(tied, tmp_path / "net")
    assert (what, where) == ("it shares its tensor with others than in the squeezed model", "0.weight")
    assert remedy == WRONG_MODEL


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "not a whole safetensors file: it is too short for its header"),
        (b"PK\3\4 a file of torch.save", "not a whole safetensors file: it is too short for its header"),
        (struct.pack("<Q", 2) + b"[]", "not written by squeeze_release.save"),
        (struct.pack("<Q", 3) + b"{]}", None),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, None),
        (struct.pack("<Q", 14) + b'{"a":1,"a":2} ', "not JSON: ValueError: a name comes twice"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", None),
    ],
    ids=["empty", "pickle", "list", "broken", "deep", "twice", "binary"],
)
def test_no_file_of_this_kind(data, what, tmp_path):
    (tmp_path / "net").write_bytes(data)
    said, where, _ = refusal(fc(), tmp_path / "net")
    assert where == "its header" and (said == what if what else said.startswith("not JSON: "))


def test_a_file_of_safetensors_that_save_did_not_write(tmp_path):
    save_file(fc().state_dict(), tmp_path / "net")
    what, where, remedy = refusal(fc(), tmp_path / "net")
    assert (what, where) == ("not written by squeeze_release.save", "its header")
    assert remedy == "load weights without a plan by model.load_state_dict(safetensors.torch.load_file(path))"


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        sr.load(fc(), tmp_path / "net")


class File:
    """A saved file taken apart, to be changed and put together again with checksums that are right."""

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        self.header, self.data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        self.json = json.loads(self.header.pop("__metadata__")["squeeze_release"])
        self.tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # not the mapped file

    def write(self, path: Path) -> None:
        sums = {}
        for name, tensor in self.tensors.items():
            head = zlib.crc32(f"{tensor.dtype} {[*tensor.shape]}".encode())
            sums[name] = zlib.crc32(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()), head)
        self.json.setdefault("checksums", {})
        if isinstance(self.json["checksums"], dict):
            self.json["checksums"] = sums
        self.json.pop("sha256", None)
        self.json["sha256"] = hashlib.sha256(json.dumps(self.json, sort_keys=True).encode()).hexdigest()
        metadata = {"squeeze_release": json.dumps(self.json)}
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, path, metadata)


def edited(name: str, path: Path, change: Callable[[File], Any]) -> list[str]:
    path.write_bytes(saved(name))
    file = File(path)
    change(file)
    file.write(path)
    return refusal(NETS[name][0](), path)


def put(*keys: str) -> Callable[[Any], Callable[[File], None]]:
    """Set a value in the JSON."""

    def setter(value: Any) -> Callable[[File], None]:
        def change(file: File) -> None:
            at = file.json
            for key in keys[:-1]:
                at = at.setdefault(key, {})
            at[keys[-1]] = value

        return change

    return setter


def tensor(name: str, value: Tensor) -> Callable[[File], None]:
    return lambda file: file.tensors.__setitem__(name, value)


NO_NUMBER = "the model has no such number that could be set"
FORM = "the description of the network has another form than save gives it"


@pytest.mark.parametrize(
    ("change", "what", "where"),
    [
        (put("stand_ins")([]), FORM, "its JSON"),
        (put("more")(1), FORM, "its JSON"),
        (put("full", "parameters", "0.weight")([8, "4"]), FORM, "its JSON"),
        (put("numbers", "0", "out_features")(5), FORM, "its JSON"),
        (put("numbers", "0", "out_features")([8]), NO_NUMBER, "0.out_features"),
        (put("numbers", "0", "forward")([0, 1]), NO_NUMBER, "0.forward"),
        (put("numbers", "0", "training")([True, True]), NO_NUMBER, "0.training"),
        (
            put("numbers", "9", "out_features")([1, 1]),
            NO_NUMBER,
            "9.out_features",
        ),
        (
            put("numbers", "0", "out_features")([8, 10**12]),
            "it is 8 in the full-size model and cannot become 1000000000000",
            "0.out_features",
        ),
        (
            put("numbers", "0", "out_features")([8, "5"]),
            "it is 8 in the full-size model and cannot become '5'",
            "0.out_features",
        ),
        (
            put("numbers", "0", "out_features")([8, True]),
            "it is 8 in the full-size model and cannot become True",
            "0.out_features",
        ),
        (
            put("numbers", "0", "out_features")([7, 5]),
            "it is 8 in this model, it was 7 before the squeeze",
            "0.out_features",
        ),
        (put("numbers", "0", "out_features")([8, 4]), "its shape is [5], Linear needs [4]", "0.bias"),
        (put("stand_ins", "0")({"class": "os.system"}), "'os.system' is no class that a stored network may use", "0"),
        (put("stand_ins", "0")({"class": ["Shift"]}), "['Shift'] is no class that a stored network may use", "0"),
        (put("stand_ins", "8")({"class": "Passthrough", "outputs": 0}), "the model has no such module", "8"),
        (
            put("stand_ins", "0")({"class": "Passthrough", "outputs": 10**9}),
            "outputs of a Passthrough cannot be 1000000000",
            "0",
        ),
        (
            put("stand_ins", "0")({"class": "Passthrough"}),
            "a Passthrough has the numbers ['outputs'], not []",
            "0",
        ),
        (
            put("stand_ins", "0")({"class": "Shift", "outputs": 0, "channel_dim": 7}),
            "channel_dim of a Shift cannot be 7",
            "0",
        ),
        (put("stand_ins", "1")({"class": "IndexedLinear"}), "a IndexedLinear cannot stand for a ReLU", "1"),
        (put("stand_ins", "0")({"class": "IndexedConv2d"}), "a IndexedConv2d cannot stand for a Linear", "0"),
        (
            put("stand_ins", "0")({"class": "IndexedLinear"}),
            "IndexedLinear does not say which inputs it gathers",
            "0",
        ),
        (
            put("stand_ins", "0")(
                {"class": "CompensatedLayerNorm", "eps": 1e-5, "channel_dim": -1, "normalized_shape": 4}
            ),
            "a CompensatedLayerNorm cannot stand for a Linear",
            "0",
        ),
        (put("ties", "0.weight")(["2.weight"]), "a name stands for two tensors", "the ties"),
        (
            put("ties", "gone")(["x"]),
            "the file says something about gone, and has no such tensor",
            "its ties",
        ),
        (put("ties", "0.weight")(["9.weight"]), "the model has no such parameter or buffer", "9.weight"),
        (tensor("9.weight", torch.ones(2)), "the model has no such parameter or buffer", "9.weight"),
        (tensor("a\nb" * 400, torch.ones(2)), "the model has no such parameter or buffer", None),
        (lambda file: file.tensors.pop("4.bias"), "the file has no such tensor", "4.bias"),
        (tensor("0.weight", torch.ones(5, 5)), "its shape is [5, 5], Linear needs [5, 4]", "0.weight"),
        (tensor("0.weight", torch.ones(5, 4, 1)), "its shape is [5, 4, 1], Linear needs [5, 4]", "0.weight"),
        (tensor("0.bias", torch.ones(5).int()), "Linear cannot compute with torch.int32 here", "0.bias"),
    ],
)
def test_hostile_files(change, what, where, tmp_path):
    said, at, remedy = edited("fc", tmp_path / "net", change)
    assert said == what and (at == where or where is None)
    assert remedy == (WRONG_MODEL if "this model" in what else DAMAGED)


@pytest.mark.parametrize("value", [-1, 99, 2**62])
@pytest.mark.parametrize("name", ["mix.body.index", "block.body.3.place"])
def test_indices_out_of_range(name, value, tmp_path):
    what, where, remedy = edited("residual", tmp_path / "net", lambda file: file.tensors[name].__setitem__(0, value))
    assert what.startswith(f"it reaches from {min(value, 0)} to " if value < 0 else "it reaches from ")
    assert what.endswith(f", there are {8 if 'index' in name else 6} channels") and where == name and remedy == DAMAGED


@pytest.mark.parametrize("name", ["mix.body.index", "block.body.3.place"])
def test_indices_of_another_kind(name, tmp_path):
    what, where, _ = edited("residual", tmp_path / "net", lambda file: file.tensors.update({name: torch.ones(2)}))
    assert where == name and ("torch.float32" in what or "shape" in what)


@pytest.mark.parametrize("count", [-1.0, 1e300, torch.inf, torch.nan, 2.5, 99.0])
def test_counts_that_no_norm_can_have(count, tmp_path):
    def change(file: File) -> None:
        name = next(name for name in file.tensors if name.endswith(".statistics"))
        file.tensors[name][0] = count

    what, where, _ = edited("residual", tmp_path / "net", change)
    assert what.startswith(("no channels that were removed give", "it keeps 6 channels and lost ")) and where in (
        "block.body.0.statistics",
        "block.body.0",
    )


@pytest.mark.parametrize("statistics", [(), (2.0, 0.0), (2.0, 0.0, 1.0, 0.0), (2.0, 0.0, -1.0), (2.0, torch.nan, 1.0)])
def test_statistics_that_no_norm_can_have(statistics, tmp_path):
    def change(file: File) -> None:
        file.tensors["block.body.0.statistics"] = torch.tensor(statistics, dtype=torch.float64)

    what, where, _ = edited("residual", tmp_path / "net", change)
    assert (
        what.startswith(("no channels that were removed give", "its shape is [")) and where == "block.body.0.statistics"
    )


def test_heads_that_do_not_fit(tmp_path):
    what, where, _ = edited("attention", tmp_path / "net", put("stand_ins", "self_attn", "num_heads")(2))
    assert what.startswith("its shape is ") and where.startswith("self_attn.in_proj")
    change = put("stand_ins", "self_attn", "num_heads")(10**9)
    assert edited("attention", tmp_path / "net", change)[0].startswith("num_heads of a NarrowMultiheadAttention cannot")


def test_another_format(tmp_path):
    what, _, remedy = edited("fc", tmp_path / "net", put("format")(2))
    assert what == f"written in format 2 of squeeze-release {sr.__version__}; this version reads format 1"
    assert remedy == "load it with the version that wrote it, or one that is newer"


def test_numbers_that_changed_on_the_disk(tmp_path):
    (tmp_path / "net").write_bytes(saved("fc"))
    data = bytearray((tmp_path / "net").read_bytes())
    data[-1] ^= 1
    (tmp_path / "net").write_bytes(data)
    what, where, remedy = refusal(fc(), tmp_path / "net")
    assert (what, where) == ("the numbers of 4.weight are not those that were saved", "4.weight") and remedy == DAMAGED


def test_what_cannot_be_saved(tmp_path):
    class Keeps(nn.Linear):
        def get_extra_state(self) -> object:
            return {}

    def refused(model: nn.Module) -> sr.StoreError:
        with pytest.raises(sr.StoreError) as caught:
            sr.save(model, tmp_path / "net")
        assert caught.value.consequence == "load could not make this network again; nothing was saved"
        assert not list(tmp_path.iterdir())
        return caught.value

    error = refused(nn.Sequential(Keeps(2, 2)))
    assert (error.what, error.where) == ("Keeps keeps state that is not a tensor", "0")
    assert error.remedy == "store what get_extra_state returns by yourself"
    net = fc()
    net.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    assert refused(net).what == "safetensors knows no torch.complex128"
    net = fc()
    net.register_buffer("__metadata__", torch.zeros(2))
    assert refused(net).what == "safetensors keeps this name for itself"
    with pytest.raises(FileNotFoundError):
        sr.save(fc(), tmp_path / "none" / "net")
    error = refused(nn.Sequential(fc(), small_fc()))
    assert (error.what, error.where) == ("a part of the model was squeezed by itself", "1")
    assert error.remedy == "save this part by itself, and put it in its place after load"
    small = small_fc()
    small[1] = nn.GELU()
    error = refused(small)
    assert (error.what, error.where) == ("GELU is not what was here before the squeeze: ReLU", "1")
    assert error.remedy == "save it before it is changed by hand, and repeat that change after load"


# ----------------------------------------------------------------------------------------------------------------- fuzz


def damage(data: bytes, draw: random.Random) -> bytes:
    """As a disk, a network or a careless tool would."""
    changed = bytearray(data)
    kind = draw.choice(["flip", "flips", "cut", "grow", "swap", "blank"])
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else 20):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del changed[draw.randrange(len(changed)) :]
    elif kind == "grow":
        changed += bytes(draw.randrange(1, 50))
    else:
        size = draw.randrange(1, 64)
        a, b = (draw.randrange(len(changed) - size) for _ in range(2))
        changed[a : a + size] = changed[b : b + size] if kind == "swap" else bytes(size)
    return bytes(changed)


PASSTHROUGH = {"class": "Passthrough", "outputs": 0}


def forge(file: File, draw: random.Random) -> None:
    """As somebody would who knows the format: JSON, names, shapes, and all checksums right."""
    name = draw.choice(sorted(file.tensors))
    old = file.tensors[name]
    kind = draw.choice(["json", "json", "json", "rename", "reshape", "numbers", "drop", "dtype"])
    if kind == "json":
        at, keys = file.json, ["stand_ins", "numbers", "ties", "frozen", "temporary", "channels_last", "full"]
        key: Any = draw.choice(keys)
        while isinstance(at[key], (dict, list)) and at[key] and draw.random() < 0.9:
            at = at[key]
            key = draw.choice([*at] if isinstance(at, dict) else [*range(len(at))])
        at[key] = draw.choice(
            [None, -1, 0, 1, 3, 2**40, 0.5, "x", [], {}, [1, 2], {"class": "Passthrough", "outputs": 0}]
        )
    elif kind == "rename":
        file.tensors[draw.choice([*file.tensors, "new", name + "x"])] = file.tensors.pop(name)
    elif kind == "reshape":
        size = old.numel()
        file.tensors[name] = draw.choice(
            [old.flatten(), old[None], old.reshape(-1)[: size // 2], old.new_zeros(0, 2**40)]
        )
    elif kind == "numbers":
        file.tensors[name] = torch.full_like(old, draw.choice([-1, 0, 1, 2, 100]))
    elif kind == "drop":
        del file.tensors[name]
    else:
        file.tensors[name] = old.to(draw.choice([torch.float16, torch.int64, torch.float64, torch.bool]))


@pytest.mark.parametrize("how", ["damaged", "forged"])
@pytest.mark.parametrize("name", NETS)
def test_mutated_files_give_an_error_or_what_they_say(name, how, tmp_path):
    """200 files in all. Damage is found, or does not matter; what is forged loads as it is written, or not at all."""
    build, _, shape = NETS[name]
    path, whole, given, x = tmp_path / "net", saved(name), build(), torch.randn(shape)
    path.write_bytes(whole)
    before, wanted, refused = copy.deepcopy(given), stored.run(sr.load(given, path), x), 0
    for seed in range(34):
        draw = random.Random(f"{name} {how} {seed}")
        path.write_bytes(whole)
        file = File(path)
        if how == "damaged":
            path.write_bytes(damage(whole, draw))
        else:
            forge(file, draw)
            file.write(path)
        try:
            loaded = sr.load(given, path)
        except sr.StoreError as error:
            assert len(str(error).splitlines()) == 4
            refused += 1
        else:
            if how == "damaged":
                assert all(map(torch.equal, stored.run(loaded, x), wanted)), seed
            own = loaded.state_dict()
            assert all(torch.equal(own[key], value) for key, value in file.tensors.items()), seed
            with contextlib.suppress(Exception):  # dtypes may be mixed, say; but it does not crash
                stored.run(loaded, x)
        untouched(given, before)
    assert refused >= 15
