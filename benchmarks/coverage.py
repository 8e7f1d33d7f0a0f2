"""The zoo run: plant dead units in every model of `zoo.py`, squeeze it, and write one row about it.

    python benchmarks/coverage.py --out results/DATE-coverage/coverage.csv [--jobs N] [--only PATTERN] [--seed S]
    python benchmarks/coverage.py --list
    python benchmarks/coverage.py one MODEL          one model in this process, with what stayed and why
    python benchmarks/coverage.py page CSV           docs/coverage.md from the rows

Each model has a process of its own, with a limit on time and memory. Rows that are there already, of the same source
and seed, are not computed again, so a run that was stopped goes on where it was.

status: exact         squeezed; old and new agree to 1e-10 in float64 on inputs that the library did not see
        refused       the library said why it does not squeeze this model
        wrong         squeezed, but old and new differ
        wrong-caught  the library's own verification found that they differ
        error, timeout, memory
"""

from __future__ import annotations

import argparse
import copy
import csv
import fnmatch
import hashlib
import importlib.util
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

TOLERANCE = 1e-10
PAGE = ROOT / "docs" / "coverage.md"
ZOO = str(Path(__file__).with_name("zoo.py"))


@dataclass
class Row:
    """One model. Numbers that there are none of are empty."""

    model: str
    family: str
    library: str
    status: str = ""
    reason: str = ""
    way_out: str = ""
    params_before: int | str = ""
    params_after: int | str = ""
    planted: int | str = ""
    removed_planted: int | str = ""
    ratio: float | str = ""
    max_error: float | str = ""
    independent_error: float | str = ""
    seconds: float | str = ""
    total_seconds: float | str = ""
    peak_mb: int | str = ""
    kinds: str = ""
    seed: int | str = ""
    source: str = ""

    @property
    def removed(self) -> float:
        return float(self.ratio) if self.ratio != "" else 0.0


def source() -> str:
    """A fingerprint of all code that a row depends on: rows of other code are computed again."""
    digest = hashlib.sha256()
    mine = "attentions blocks heads leaves noise observe precision planter streams watch zoo".split()
    files = [*sorted((ROOT / "src").rglob("*.py")), *(Path(__file__).with_name(f"{name}.py") for name in mine)]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


# ------------------------------------------------------------------------------------------------------------ one model


def examine(entry: Any, seed: int, say: Any = lambda *_: None) -> Row:
    """Build, plant, squeeze, compare. Never raises but for what nobody foresaw."""
    import torch
    from planter import plant

    import squeeze_release as sr

    row = Row(entry.name, entry.family, entry.library, seed=seed, source=source())
    torch.manual_seed(seed)
    model = entry.build().eval().double()
    row.params_before = sum(p.numel() for p in model.parameters())
    few, many = (entry.inputs(n, torch.Generator().manual_seed(seed + 1)) for n in (3, 12))
    plants = plant(model, few, seed, many)
    row.planted, row.kinds = plants.count, " ".join(plants.kinds)
    model.requires_grad_(True)
    original = copy.deepcopy(model)
    args, kwargs = entry.inputs(2, torch.Generator().manual_seed(seed + 2))
    started = time.perf_counter()
    try:
        small, report = sr.squeeze(model, args, kwargs)
    except sr.VerificationError as error:
        row.status, row.reason, row.way_out = "wrong-caught", _line(f"{error.what} ({error.where})"), error.remedy
        return row
    except sr.SqueezeError as error:
        row.status, row.reason, row.way_out = "refused", _line(f"{error.where}: {error.what}"), error.remedy
        return row
    finally:
        row.seconds = round(time.perf_counter() - started, 2)
    row.params_after = report.params_after
    row.max_error = report.max_error if report.max_error is not None else ""
    left = remaining(plants.masks, report, small)
    row.removed_planted = plants.count - sum(left.values())
    row.ratio = round(row.removed_planted / max(plants.count, 1), 4)
    reasons = why(left, report.kept)
    row.reason = _line(reasons.most_common(1)[0][0]) if reasons and row.removed < 1 else ""
    row.independent_error = compare(original, small, entry.inputs(5, torch.Generator().manual_seed(seed + 3)))
    row.status = "exact" if row.independent_error <= TOLERANCE else "wrong"
    say(report, left, reasons)
    return row


def remaining(masks: dict[str, Any], report: Any, small: Any) -> Counter[str]:
    """Planted entries that are still there, by parameter."""
    left: Counter[str] = Counter()
    now = dict(small.named_parameters(remove_duplicate=False))
    for name, mask in masks.items():
        if name in now:
            for dim, index in report.slices.get(name, {}).items():
                mask = mask.index_select(dim, index)
            if name in report.group_columns:
                columns = report.group_columns[name].unflatten(1, (-1, *[1] * (mask.dim() - 2)))
                mask = mask.gather(1, columns.expand(-1, -1, *mask.shape[2:]))
            left[name] = int(mask.sum())
    return +left


def why(left: Counter[str], kept: Any) -> Counter[str]:
    """Reasons, weighted by the planted entries that stayed where they are given for, or nearest to that."""
    reasons: Counter[str] = Counter()
    place: dict[str, str] = {}
    for parameter, count in left.items():
        shared = {row.name: _shared(row.name, parameter) for row in kept}
        nearest = [row for row in kept if shared[row.name] == max(shared.values())]
        total = sum(row.count for row in nearest)
        for row in nearest:
            where, _, text = row.reason.partition(": ")
            place.setdefault(text or where, where)
            reasons[text or where] += round(count * row.count / total)
        if not nearest:
            reasons["no reason given"] += count
    return Counter({f"{text} ({place[text]})" if text in place else text: n for text, n in reasons.items()})


def _shared(module: str, parameter: str) -> int:
    """How many parts of their dotted names are the same, from the left."""
    return sum(
        1
        for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(module.split("."), parameter.split("."), strict=False))
    )


def compare(old: Any, new: Any, call: Any) -> float:
    """The largest difference of any output, relative to its spread, in float64, on inputs of another batch size."""
    import torch
    from observe import Float64, tensors

    worst = 0.0
    with torch.no_grad(), Float64():
        pair = [tensors(model.eval()(*call[0], **copy.deepcopy(call[1]))) for model in (old, new)]
    if len(pair[0]) != len(pair[1]):
        return float("inf")
    for a, b in zip(*pair, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
            return float("inf")
        if a.is_floating_point():  # against how much the output varies: a large bias must not hide an error
            spread = (a - a.mean(0)).abs().max() if a.dim() else a.abs()
            worst = max(worst, float((a - b).abs().max() / torch.maximum(spread, 1e-4 * a.abs().max()).clamp(min=1e-6)))
        elif bool((a != b).any()):
            return float("inf")
    return worst


def _line(text: str) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= 240 else f"{text[:237]}..."


def child(name: str, seed: int, result: str, zoo: str = ZOO) -> None:
    """The process of one model: the row goes to a file, as JSON."""
    warnings.simplefilter("ignore")
    entry = next(entry for entry in entries(zoo) if entry.name == name)
    started = time.perf_counter()
    try:
        row = examine(entry, seed, _print_details if not result else lambda *_: None)
    except MemoryError:
        row = Row(name, entry.family, entry.library, "memory", "MemoryError", seed=seed, source=source())
    except Exception as error:
        if not result:
            raise
        where = _last_place(error)
        row = Row(name, entry.family, entry.library, "error", _line(f"{type(error).__name__}: {error} ({where})"))
        row.seed, row.source = seed, source()
    row.total_seconds = round(time.perf_counter() - started, 1)
    row.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    text = json.dumps(asdict(row), indent=1)
    print(text) if not result else Path(result).write_text(text)


def entries(file: str) -> list[Any]:
    """What a file like zoo.py lists."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.ENTRIES)


def _last_place(error: Exception) -> str:
    trace, place = error.__traceback__, ""
    while trace is not None:
        place = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _print_details(report: Any, left: Counter[str], reasons: Counter[str]) -> None:
    print(report)
    print("\nplanted entries that stayed, by reason")
    for reason, count in reasons.most_common(12):
        print(f"{count:>10,}  {reason}")
    print("\nby parameter")
    for name, count in left.most_common(30):
        print(f"{count:>10,}  {name}")


# ------------------------------------------------------------------------------------------------------------ all of it


@dataclass
class Job:
    entry: Any
    process: subprocess.Popen[bytes]
    result: Path
    started: float
    peak: int = 0


def start(entry: Any, args: argparse.Namespace, folder: str) -> Job:
    result = Path(folder) / f"{entry.library}-{entry.name}.json"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment["OMP_NUM_THREADS"] = str(args.threads)
    options = ["--seed", str(args.seed), "--zoo", args.zoo, "--result", str(result)]
    command = [sys.executable, __file__, "one", entry.name, *options]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    return Job(entry, process, result, time.monotonic())


def finished(job: Job, seed: int, seconds: float, megabytes: int) -> Row | None:
    """The row of a job that has ended, by itself or because it went over a limit."""
    row = Row(job.entry.name, job.entry.family, job.entry.library, seed=seed, source=source())
    row.total_seconds = round(time.monotonic() - job.started, 1)
    code = job.process.poll()
    job.peak = row.peak_mb = max(job.peak, _resident(job.process.pid))
    if code is not None:
        if code == 0 and job.result.exists():
            return Row(**json.loads(job.result.read_text()))
        row.status, row.reason = "error", f"the process ended with {_code(code)}"
        return row
    if job.peak > megabytes:
        row.status, row.reason = "memory", f"more than {megabytes:,} MB"
    elif time.monotonic() - job.started > seconds:
        row.status, row.reason = "timeout", f"more than {seconds:.0f} s"
    else:
        return None
    os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait()
    return row


def _code(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20
    except (OSError, IndexError):
        return 0


def read_rows(path: Path) -> list[Row]:
    """All whole rows: a run that was killed may have left half of one."""
    if not path.exists():
        return []
    names = [f.name for f in fields(Row)]
    with path.open(newline="") as file:
        lines = [line for line in csv.reader(file) if len(line) == len(names)]
    return [Row(*line) for line in lines if line != names]


def write_rows(path: Path, rows: list[Row]) -> None:
    """The whole file at once, under its name only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    with beside.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f.name for f in fields(Row)])
        writer.writerows([list(asdict(row).values()) for row in rows])
    beside.replace(path)


def run(args: argparse.Namespace) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    every = entries(args.zoo)
    wanted = args.only.split(",") if args.only else ["*"]
    chosen = [e for e in every if any(fnmatch.fnmatch(n, w) for n in (e.name, e.family, e.library) for w in wanted)]
    if args.list:
        for entry in chosen:
            print(f"{entry.library:13} {entry.family:28} {entry.name}")
        return 0
    out = Path(args.out)
    mark = source()
    known = {row.model: row for row in read_rows(out)}
    waiting = [
        e
        for e in chosen
        if e.name not in known or (known[e.name].source, str(known[e.name].seed)) != (mark, str(args.seed))
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    running: list[Job] = []
    with tempfile.TemporaryDirectory() as folder, Progress(*columns) as progress:
        task = progress.add_task("", total=len(chosen), completed=len(chosen) - len(waiting))
        try:
            while waiting or running:
                while waiting and len(running) < args.jobs:
                    running.append(start(waiting.pop(0), args, folder))
                progress.update(task, description=", ".join(job.entry.name for job in running)[:60])
                time.sleep(0.2)
                for job in running[:]:
                    row = finished(job, args.seed, args.time_limit, args.memory_limit)
                    if row:
                        running.remove(job)
                        known[row.model] = row
                        write_rows(out, [known[e.name] for e in every if e.name in known])
                        progress.advance(task)
                        progress.console.print(
                            f"{row.model:36} {row.status:12} {row.ratio:<7} {row.total_seconds:>6} s  {row.reason}"
                        )
        finally:
            for job in running:
                os.killpg(job.process.pid, signal.SIGKILL)
    bad = [row for row in known.values() if row.status.startswith("wrong")]
    return 1 if bad else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", default="run", choices=("run", "one", "page"))
    parser.add_argument("what", nargs="?", default="", help="a model for `one`, a CSV for `page`")
    parser.add_argument("--out", default=str(ROOT / "results" / "coverage" / "coverage.csv"))
    parser.add_argument("--only", default="", help="patterns for names, families or libraries, with commas")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=1800.0, help="seconds a model")
    parser.add_argument("--memory-limit", type=int, default=16000, help="megabytes a model")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--zoo", default=ZOO, help="the file that lists the models as ENTRIES")
    parser.add_argument("--result", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.command == "one":
        child(args.what, args.seed, args.result, args.zoo)
        return 0
    if args.command == "page":
        from coverage_page import page

        PAGE.write_text(page(read_rows(Path(args.what)), args.what))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
