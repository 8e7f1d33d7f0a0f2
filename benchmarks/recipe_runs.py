"""Seeds of a recipe side by side, and a row for each: results/RECIPE/runs.csv, a row for each cycle, and tables.

    python benchmarks/recipe_runs.py run fc-mnist --runs runs --seeds 0,1,2,3,4 --jobs 10 \
        --configs paper/baseline,paper/squeeze-release,best/squeeze-release --data DIR
    python benchmarks/recipe_runs.py table fc-mnist --runs runs

`run` starts one process a seed, with one thread each, and goes on with runs that were stopped; `table` reads what is
there. A config is a preset and a mode, and after that changes to its Config: best/squeeze-release/finish_units=2.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COLUMNS = (
    "config seed accuracy mask_alive deployable_weights deployable_params cycles seconds epochs "
    "max_error max_difference max_relative"
).split()
CURVE = "config seed cycle accuracy mask_alive deployable_weights deployable_params prune_epochs".split()


def folder(runs: Path, config: str, seed: int) -> Path:
    return runs / f"{config.replace('/', '-')}-{seed}"


def start(recipe: str, config: str, seed: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    preset, mode, *changes = config.split("/")
    command = [sys.executable, "-m", "squeeze_release", "run", recipe, "--preset", preset, "--mode", mode]
    command += ["--seed", str(seed), "--run-dir", str(folder(args.runs, config, seed)), "--resume", "--quiet"]
    for option in ("data", "start", "stop_after"):
        if getattr(args, option):
            command += [f"--{option.replace('_', '-')}", getattr(args, option)]
    for change in changes:
        command += ["--rules", change.removeprefix("rules=")] if change.startswith("rules=") else ["--set", change]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def run(args: argparse.Namespace) -> int:
    waiting = [(config, seed) for seed in args.seeds for config in args.configs]
    waiting = [
        (config, seed) for config, seed in waiting if not (folder(args.runs, config, seed) / "summary.json").exists()
    ]
    running: dict[subprocess.Popen[bytes], tuple[str, int]] = {}
    failed = 0
    while waiting or running:
        while waiting and len(running) < args.jobs:
            job = waiting.pop(0)
            running[start(args.recipe, *job, args)] = job
        for process in [p for p in running if p.poll() is not None]:
            config, seed = running.pop(process)
            failed += process.returncode != 0
            print(f"{config} seed {seed}: {_line(folder(args.runs, config, seed), process.returncode)}", flush=True)
        time.sleep(0.5)
    return 1 if failed else 0


def _line(path: Path, code: int) -> str:
    if code:
        return f"failed with {code}"
    row = json.loads((path / "summary.json").read_text())
    return (
        f"{row['accuracy']:.2%} {row['deployable_weights']:,} weights, {row['cycles']} cycles, {row['seconds']:.0f} s"
    )


def rows(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row a run, and a row a cycle of each."""
    found, cycles = [], []
    for config in args.configs:
        for seed in args.seeds:
            path, which = folder(args.runs, config, seed), {"config": config, "seed": seed}
            if (path / "summary.json").exists():
                summary = json.loads((path / "summary.json").read_text())
                lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
                summary["epochs"] = _epochs(lines)
                found.append(which | {name: summary.get(name, "") for name in COLUMNS[2:]})
                cycles += [which | {name: line[name] for name in CURVE[2:]} for line in _cycles(lines)]
    return found, cycles


def _epochs(lines: list[dict[str, Any]]) -> int:
    """Of all phases. An update of the masks may take several of them, in one line."""
    phases = {(line["cycle"], line["phase"]): line["epoch"] for line in lines if line["event"] == "epoch"}
    return sum(phases.values())


def _cycles(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The network at the end of each cycle: its validation accuracy, and how far pruning had come when it ended."""
    pruned = {line["cycle"]: line for line in lines if line["event"] == "epoch" and line["phase"] == "prune"}
    return [
        line | {"prune_epochs": pruned[line["cycle"]]["epoch"] if line["cycle"] else 0}
        for line in lines
        if line["event"] == "cycle"
    ]


def write(path: Path, columns: list[str], content: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(content)


def table(args: argparse.Namespace) -> int:
    from scipy.stats import ttest_ind

    found, cycles = rows(args)
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "runs.csv", COLUMNS, found)
    write(args.out / "cycles.csv", CURVE, cycles)
    print(
        "| config | seeds | accuracy (%) | mask-alive | deployable weights | deployable parameters | cycles | seconds |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for config in args.configs:
        mine = [row for row in found if row["config"] == config]
        if mine:
            cells = [_spread([100 * row["accuracy"] for row in mine], 2)]
            sizes = ("mask_alive", "deployable_weights", "deployable_params")
            cells += [_spread([row[name] for row in mine], 0) for name in sizes]
            cells += [_spread([row["cycles"] for row in mine], 1), _spread([row["seconds"] for row in mine], 0)]
            print(f"| {config} | {len(mine)} | {' | '.join(cells)} |")
    worst = {name: max((row[name] for row in found), default=0.0) for name in ("max_error", "max_difference")}
    print(f"\nlargest error of any squeeze: {worst['max_error']:.1e} relative in float64, "
          f"{worst['max_difference']:.1e} of a logit in float32")  # fmt: skip
    first, *others = [[row for row in found if row["config"] == config] for config in args.configs]
    for other in others:
        if len(first) > 1 and len(other) > 1:
            accuracies = ([row["accuracy"] for row in each] for each in (first, other))
            p = float(ttest_ind(*accuracies, equal_var=False).pvalue)
            ratio = statistics.mean(r["seconds"] for r in other) / statistics.mean(r["seconds"] for r in first)
            print(f"{other[0]['config']} against {first[0]['config']}: Welch's t-test on accuracy p = {p:.3f}, "
                  f"{ratio:.1f} times the seconds")  # fmt: skip
    return 0


def _spread(values: list[float], digits: int) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):,.{digits}f} ± {spread:,.{digits}f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("recipe")
    parser.add_argument("--runs", type=Path, required=True, help="the folder of the run directories")
    parser.add_argument(
        "--configs", type=lambda text: text.split(","), default=["paper/baseline", "paper/squeeze-release"]
    )
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--data", default="")
    parser.add_argument("--start", default="", help="a checkpoint that every run starts from")
    parser.add_argument("--stop-after", default="", help="seconds, after which runs stop, to be gone on with")
    parser.add_argument("--out", type=Path, default=None, help="where runs.csv goes; results/RECIPE")
    args = parser.parse_args(argv)
    args.out = args.out or ROOT / "results" / args.recipe
    return run(args) if args.command == "run" else table(args)


if __name__ == "__main__":
    sys.exit(main())
