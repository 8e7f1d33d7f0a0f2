"""The commands squeeze, inspect, bench, report and demo."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import elsewhere
import pytest
import torch
from nets import dead
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

import squeeze_release as sr
from squeeze_release import cli, demo

Typed = Callable[..., tuple[int, str, str]]
MODEL = "small_models:chain"
SOURCE = """
from torch import nn

def chain(hidden=32):
    return nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 4))

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, ids, mask=None):
        return self.out(self.table(ids) if mask is None else self.table(ids) * mask[..., None])
"""


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typed:
    """A command line -> exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["squeeze-release", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capsys.readouterr()

    return call


@pytest.fixture
def pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A folder with code, a checkpoint with masks, `pruned.pt`, and the model that it is of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "small_models", raising=False)
    Path("small_models.py").write_text(SOURCE)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    prune.ln_structured(net[0], "weight", amount=0.75, n=2, dim=0)
    torch.save({"state_dict": net.state_dict(), "epoch": 3}, "pruned.pt")
    return net.eval()


def test_squeeze_writes_what_is_asked_for(pruned: nn.Module, typed: Typed) -> None:
    files = ["-o", "small.safetensors", "--onnx", "small.onnx", "--pt2", "small.pt2"]
    code, out, err = typed("squeeze", MODEL, "pruned.pt", "--input", "2x16", *files)
    assert code == 0 and "16 -> 8" in out and "max error" in out and "writing small.onnx" in err
    x = torch.randn(5, 16)
    expected = pruned(x).detach()
    from small_models import chain

    loaded = sr.load(chain(), "small.safetensors")
    assert loaded[0].out_features == 8
    strict = ["-o", "s", "--onnx", "s.onnx", "--tolerance", 0]
    code, _, err = typed("squeeze", MODEL, "pruned.pt", "--input", "2x16", *strict)
    assert code == 1 and "allowed are 0.0e+00" in err and not Path("s.onnx").exists()
    for found in (loaded(x), *elsewhere.run(Path("small.onnx"), [x]), *elsewhere.run(Path("small.pt2"), [x])):
        torch.testing.assert_close(found, expected)


def test_json_is_all_there_is_on_stdout(pruned: nn.Module, typed: Typed) -> None:
    code, out, err = typed("squeeze", MODEL, "pruned.pt", "--input", "2x16", "-o", "s.safetensors", "--json", "--quiet")
    data = json.loads(out)
    assert code == 0 and not err and data["after"]["params"] == 8 * 17 + 4 * 9 and data["max_error"] < 1e-10
    assert data["files"] == [{"path": "s.safetensors", "bytes": Path("s.safetensors").stat().st_size}]
    assert data["layers"][0]["after"] == "16 -> 8"
    code, out, err = typed("inspect", MODEL, "pruned.pt", "--input", "2x16", "--json")
    assert code == 0 and json.loads(out)["widths"][0]["after"] == 8 and "looking" in err
    timed = ["bench", MODEL, "pruned.pt", "--input", "2x16", "--seconds", 0, "--small", "s.safetensors"]
    code, out, err = typed(*timed, "--json")
    (found,) = json.loads(out)["benches"]
    assert code == 0 and [row["name"] for row in found["rows"]] == ["masked", "squeezed"] * 2


def test_options_reach_squeeze(pruned: nn.Module, typed: Typed) -> None:
    common = ["squeeze", MODEL, "pruned.pt", "--input", "2x16", "-o", "s.safetensors", "--json", "--quiet"]
    kept = json.loads(typed(*common, "--keep", "0", "--no-verify")[1])
    assert kept["layers"] == [] and kept["max_error"] is None
    typed(*common, "--dtype", "float64", "--rules", "A", "--compaction", "index")
    from small_models import chain

    assert sr.load(chain(), "s.safetensors")[0].weight.dtype is torch.float64
    assert typed(*common, "--rules", "B")[0] == 2
    assert typed(*common, "--compaction", "gather")[0] == 2
    assert typed(*common, "--keep", "nobody")[0] == 1


def test_inspect_and_bench_print_tables(pruned: nn.Module, typed: Typed) -> None:
    code, out, _ = typed("inspect", MODEL, "pruned.pt", "--input", "2x16")
    assert code == 0 and "8: 2 (aten.linear): reads it" in out
    code, out, err = typed("bench", MODEL, "pruned.pt", "--input", "2x16", "--seconds", 0, "--threads", 1)
    assert (
        code == 0 and "masked" in out and "squeezed" in out and "cpu, float32, 1 thread" in out and "squeezing" in err
    )


def test_keywords_and_tokens(pruned: nn.Module, typed: Typed) -> None:
    from small_models import Tokens

    save_file(Tokens().state_dict(), "tokens.safetensors")
    tokens = ["inspect", "small_models:Tokens", "tokens.safetensors", "--json", "--quiet"]
    for shapes in (["2x5:int64"], ["2x5:int64:50", "mask=2x5"], ["mask=2x5:float32", "ids=2x5:int64"]):
        assert typed(*tokens, *(word for shape in shapes for word in ("--input", shape)))[0] == 0
    code, _, err = typed(*tokens, "--input", "2x5:int64:1000")
    assert code == 1 and "cannot run on the example inputs: IndexError" in err


def test_a_network_that_was_squeezed_before(pruned: nn.Module, typed: Typed) -> None:
    assert typed("squeeze", MODEL, "pruned.pt", "--input", "2x16", "-o", "one.safetensors", "--quiet")[0] == 0
    from small_models import chain

    small = sr.load(chain(), "one.safetensors")
    dead(small[0], 0, 1, 2)
    sr.save(small, "pruned-again.safetensors")
    code, out, _ = typed("squeeze", MODEL, "pruned-again.safetensors", "--input", "2x16", "-o", "two.safetensors")
    assert code == 0 and "16 -> 5" in out and sr.load(chain(), "two.safetensors")[0].out_features == 5


def test_errors_end_with_1_and_leave_nothing(pruned: nn.Module, typed: Typed) -> None:
    there = {*Path().iterdir()}
    common = ["squeeze", MODEL, "pruned.pt", "--input", "2x16", "-o"]
    for arguments, words in (
        ([*common, "none/small.safetensors"], "there is no folder 'none'"),
        ([*common, "s.safetensors", "--onnx", "none/s.onnx"], "there is no folder 'none'"),
        (["squeeze", MODEL, "pruned.pt", "--input", "2x17", "-o", "s"], "mat1 and mat2"),
        (["squeeze", MODEL, "absent.pt", "--input", "2x16", "-o", "s"], "there is no such file"),
        (["squeeze", f"{MODEL}?hidden=8", "pruned.pt", "--input", "2x16", "-o", "s"], "32x16, in the model 8x16"),
        (["bench", MODEL, "pruned.pt", "--input", "2x16", "--small", "pruned.pt"], "not a whole safetensors file"),
        (["report", "none", "-o", "page.html"], "there is no folder 'none'"),
    ):
        code, out, err = typed(*arguments)
        assert code == 1 and words in err and "remedy:" in err and not out
    assert {path for path in Path().iterdir() if path.name != "__pycache__"} == there - {Path("__pycache__")}


def test_wrong_arguments_end_with_2(pruned: nn.Module, typed: Typed) -> None:
    common = ["squeeze", MODEL, "pruned.pt", "-o", "s"]
    for arguments in (
        common,  # no input
        ["squeeze", MODEL, "pruned.pt", "--input", "2x16"],  # nowhere to write
        ["squeeze", MODEL],
        [*common, "--input", "2x16", "--onnx", "small.pt2"],
        [*common, "--input", "2x16", "--dtype", "int8"],
        [*common, "--input", "2x16", "--surprise"],
        ["bench", MODEL, "pruned.pt", "--input", "2x16", "--device", "abacus"],
        ["bench", MODEL, "pruned.pt", "--input", "2x16", "--threads", "0"],
        ["report", "."],
        ["squeez"],
    ):
        code, out, err = typed(*arguments)
        assert code == 2 and "Error" in err and not out, arguments


@pytest.mark.parametrize("command", ["squeeze", "inspect", "bench", "run", "report", "demo"])
def test_every_command_has_help_with_an_example_and_its_exit_codes(command: str, typed: Typed) -> None:
    code, out, _ = typed(command, "--help")
    assert code == 0 and f"squeeze-release {command}" in out
    assert "Ends with 0" in out or command == "run"
    assert "2 for wrong" in " ".join(typed("--help")[1].split())


def test_demo(monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    for code in (0, 1):
        monkeypatch.setattr(demo, "main", lambda code=code: code)
        assert typed("demo")[0] == code


def test_pages(pruned: nn.Module, typed: Typed) -> None:
    pytest.importorskip("squeeze_release.page")
    common = ["squeeze", MODEL, "pruned.pt", "--input", "2x16", "-o", "s.safetensors", "--quiet"]
    assert typed(*common, "--report", "page.html")[0] == 0
    page = Path("page.html").read_text()
    assert page.startswith("<!") and "squeeze-release squeeze" in page and "masked" in page
    Path("run").mkdir()
    assert typed("report", "run", "-o", "run.html")[0] == 1  # nothing in it
