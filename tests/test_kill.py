"""kill -9 at random moments: what comes out in the end is what would have come out anyway."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

import squeeze_release as sr

KILLS = 10


def _work(folder: str) -> None:
    torch.set_num_threads(1)
    tiny.run(run_dir=folder, resume=True, checkpoint_seconds=0)


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.ForkServerContext:
    """New processes that have torch imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny"])
    return context


def test_ten_kills(tmp_path: Path, processes: multiprocessing.context.ForkServerContext) -> None:
    started = time.monotonic()
    whole = tiny.run(run_dir=tmp_path / "whole", checkpoint_seconds=0)
    seconds = time.monotonic() - started
    folder, draw, kills = tmp_path / "killed", random.Random(0), 0
    while kills < KILLS:
        process = processes.Process(target=_work, args=(str(folder),))
        process.start()
        process.join(draw.uniform(0.02, 0.3) * seconds)
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            assert process.exitcode == -signal.SIGKILL
            kills += 1
        else:  # it was done before we came to kill it: begin another one
            assert process.exitcode == 0
            assert _outcome(folder) == _outcome(tmp_path / "whole")
            folder = tmp_path / f"killed-{kills}"
    last = tiny.run(run_dir=folder, resume=True)
    assert last.summary | {"seconds": 0} == whole.summary | {"seconds": 0}
    assert _outcome(folder) == _outcome(tmp_path / "whole")


def _outcome(folder: Path) -> tuple[str, dict[str, bytes]]:
    """The summary but for its seconds, and the bytes of every tensor of the network."""
    lines = [line for line in (folder / "summary.json").read_text().splitlines() if "seconds" not in line]
    tensors = load_file(folder / "final.safetensors")
    return "\n".join(lines), {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_what_a_kill_leaves_half_written_does_no_harm(tmp_path: Path) -> None:
    class Breaks(tiny.Training):
        epochs = 0

        def epoch(self, *arguments: object) -> None:
            self.epochs += 1
            if self.epochs == 8:
                raise KeyboardInterrupt
            super().epoch(*arguments)  # type: ignore[arg-type]

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        tiny.run(training=Breaks(), run_dir=folder, checkpoint_seconds=0)
    (folder / "state.part").write_bytes(b"half a st")
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"event": "epo')
    resumed, whole = tiny.run(run_dir=folder, resume=True), tiny.run()
    assert resumed.summary | {"seconds": 0} == whole.summary | {"seconds": 0}
    assert all(json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())


def test_a_state_that_is_not_ours_is_an_error(tmp_path: Path) -> None:
    tiny.run(run_dir=tmp_path / "run")
    (tmp_path / "run" / "state.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    with pytest.raises(sr.InputError, match="cannot be read"):
        tiny.run(run_dir=tmp_path / "run", resume=True)
