"""The command line, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_recipes import digits
from typer.testing import CliRunner

from squeeze_release import cli
from squeeze_release.recipes import fc_mnist


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset of a second."""
    from dataclasses import replace

    quick = fc_mnist.PRESETS["quick"]
    config = replace(quick.config, train_epochs=2, prune_epochs=2, finetune_epochs=1, final_epochs=1, max_cycles=1)
    monkeypatch.setitem(fc_mnist.PRESETS, "quick", replace(quick, config=replace(config, threshold=0.0, max_drop=1.0)))


def test_run_prints_its_summary_and_resumes(tmp_path: Path, brief: None) -> None:
    command = ["run", "fc-mnist", "--data", str(digits(tmp_path)), "--run-dir", str(tmp_path / "run")]
    command += ["--set", "last_ratio=0.3", "--set", "schedule=linear"]
    result = CliRunner().invoke(cli.app, [*command, "--tensorboard"], catch_exceptions=False)
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "cycle   0   validation" in result.stderr and "191,104 weights" in result.stderr
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["last_ratio"] == 0.3
    again = CliRunner().invoke(cli.app, [*command, "--resume", "--quiet"], catch_exceptions=False)
    assert json.loads(again.stdout) == summary and not again.stderr


def test_errors_are_printed_and_end_with_1(
    tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["squeeze-release", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    assert call("run", "fc-mnist", "--preset", "fast") == 1
    assert "error: fc-mnist has no preset 'fast'" in capsys.readouterr().err
    folder = str(digits(tmp_path))
    assert call("run", "fc-mnist", "--data", folder, "--run-dir", f"{folder}/run", "--quiet") == 0
    assert call("run", "fc-mnist", "--data", folder, "--run-dir", f"{folder}/run") == 1
    assert "holds a run already" in capsys.readouterr().err
    assert call("run", "fc-mnist", "--data", folder, "--set", "epochs=3") == 1
    assert "error: 'epochs=3' changes nothing" in capsys.readouterr().err
    assert call("run", "fc-mnist", "--data", folder, "--set", "rules=A") == 1
    assert "use --rules A" in capsys.readouterr().err
    stopping = ["run", "fc-mnist", "--data", folder, "--run-dir", f"{folder}/other", "--quiet"]
    assert call(*stopping, "--stop-after", "0") == 3
    assert capsys.readouterr().err.startswith("the run has used up its 0 seconds")
    assert call(*stopping, "--resume") == 0
    assert call("run", "mnist-fc") == 2
    assert call("run", "fc-mnist", "--mode", "sideways") == 2
    assert call("run", "--help") == 0
