"""How fast the small network is: beside the masked one, an ideal dense one of the same widths, and what peers make.

    python benchmarks/latency.py --out results/DATE-latency/latency.csv                  # this machine's GPU or CPU
    python benchmarks/latency.py --device cpu --threads 2 --batches 1 --side 224 --out results/DATE-latency/cpu.csv
    python benchmarks/latency.py --how eager --side 64 --batches 1 8 --only vit_small    # a try

`ideal` is the small network with plain norms in place of the compensated ones: what training a dense network of these
widths from scratch would give. All of a case take turns in one run, for half of the rounds prepared in the opposite
order; times are medians over rounds with quartiles, and ratios are taken round by round. `eager` is a stream of calls,
`graph` their replay as a CUDA graph (where the host is the limit, the device's own time), `compiled` is torch.compile,
which takes minutes for each batch size and dtype. Errors are the largest difference from the masked network, relative
to its largest output, in float32 on the CPU.

Compiling is most of the work and hardly needs the GPU: several of these with one --in-turns FILE compile side by side,
and measure one after the other.

Every row is written as it is made, and a case that the file has is not measured again. --seconds is a budget: no case
begins after it. Exit code 1 if the small network is slower than 1.03 times the ideal one anywhere.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from latency_nets import NETWORKS, PEERS, ideal, masked, small
from timing import Spread, append, captured, interleaved, machine, markdown, rows_of
from torch import Tensor, nn

from squeeze_release.modules.kernels import shortest, usual

BOUND = 1.03
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HOWS = ("eager", "graph", "compiled")
KEY = ("network", "share", "side", "device", "threads", "dtype", "batch", "how")
SHOWN = (
    "network",
    "device",
    "dtype",
    "batch",
    "how",
    "who",
    "parameters",
    "error",
    "ms",
    "to ideal",
    "speedup",
    "note",
)


class Contender(NamedTuple):
    model: nn.Module | None
    error: float
    note: str = ""


def contenders(name: str, options: argparse.Namespace) -> dict[str, Contender]:
    """All on the CPU in float32; what a peer cannot do is a note."""
    model, x = masked(name, options.share, options.side)
    narrow = small(model, x)
    made: dict[str, Callable[[], nn.Module]] = {
        "masked": lambda: model,
        "small": lambda: narrow,
        "ideal": lambda: ideal(model, narrow),
        **{peer: lambda shrink=shrink: shrink(model, x) for peer, shrink in PEERS.items()},  # type: ignore[misc]
    }
    with torch.no_grad():
        want = model(x)
    found = {}
    for who, make in made.items():
        try:
            network = make().eval()
            with torch.no_grad():
                error = float((network(x) - want).abs().max() / want.abs().max())
            found[who] = Contender(network, error)
        except ModuleNotFoundError as error:
            found[who] = Contender(None, 0.0, f"not here: {error.name}")
        except Exception as error:  # a peer's own
            if who not in PEERS:
                raise
            found[who] = Contender(None, 0.0, f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
    return found


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"over {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go of as the file is closed
        yield


def prepared(model: nn.Module, x: Tensor, how: str, options: argparse.Namespace) -> Callable[[], Any]:
    """The call to time, warm."""

    @torch.inference_mode()
    def call() -> Any:
        return network(x)

    network: Any = copy.deepcopy(model).to(x.device, x.dtype)
    if how == "compiled":
        # In a function of its own: what is compiled belongs to code, and networks of one class would look through each
        # other's at every call. In a file that there is, for torch 2.11 wraps all others in one and the same function.
        exec(compile("def run(x): return network(x)", __file__, "exec"), scope := {"network": network})
        network = torch.compile(scope["run"], dynamic=False)
        with time_limit(options.compile_seconds):
            call()
    call()
    usual.wait()  # kernels are called by Python until C++ is built
    call()
    return captured(call) if how == "graph" else call


def measure(case: dict[str, Any], found: dict[str, Contender], options: argparse.Namespace) -> list[dict[str, Any]]:
    shape, on_gpu = NETWORKS[case["network"]].shape(case["side"]), case["device"] != "cpu"
    torch.manual_seed(0)
    x = torch.randn(case["batch"], *shape, dtype=DTYPES[case["dtype"]], device=case["device"])
    torch._dynamo.reset()  # once a case: it forgets what was compiled before
    notes = {who: each.note for who, each in found.items()}
    # Twice, there and back: who is prepared first finds other memory, and is slower by a percent or two.
    sets = [all_prepared(order, x, case["how"], notes, options) for order in (found, dict(reversed(found.items())))]
    with alone(options.in_turns):
        halves = [interleaved(calls, on_gpu, -(-options.rounds // 2), options.sample) for calls in sets]
    times = {who: first + halves[1][who] for who, first in halves[0].items() if who in halves[1]}
    return [row(case, who, each, notes[who], times) for who, each in found.items() if who in times or notes[who]]


def all_prepared(
    found: dict[str, Contender], x: Tensor, how: str, notes: dict[str, str], options: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    calls = {}
    for who, each in found.items():
        if each.model is None or (how == "compiled" and who in PEERS):
            continue
        try:
            calls[who] = prepared(each.model, x, how, options)
        except (TimeoutError, RuntimeError, TypeError) as error:  # compiling took long, or a peer cannot be captured
            if who not in PEERS and how != "compiled":
                raise
            notes[who] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return calls


def row(case: dict[str, Any], who: str, each: Contender, note: str, times: dict[str, list[float]]) -> dict[str, Any]:
    line = {**case, "who": who, "parameters": "", "error": "", "ms": "", "ms low": "", "ms high": "", "to ideal": "",
            "to ideal low": "", "to ideal high": "", "speedup": "", "note": note}  # fmt: skip
    if each.model is not None:
        line["parameters"] = sum(parameter.numel() for parameter in each.model.parameters())
        line["error"] = "another function" if who == "ideal" and each.error > 1e-4 else f"{each.error:.1e}"
    if who in times:
        milliseconds = [1e3 * seconds for seconds in times[who]]
        line["ms low"], line["ms"], line["ms high"] = (f"{value:.4g}" for value in Spread.of(milliseconds))
        if "ideal" in times:
            ratios = Spread.of([a / b for a, b in zip(times[who], times["ideal"], strict=True)])
            line["to ideal low"], line["to ideal"], line["to ideal high"] = (f"{value:.3f}" for value in ratios)
        if "masked" in times:
            gains = Spread.of([a / b for a, b in zip(times["masked"], times[who], strict=True)])
            line["speedup"] = f"{gains.middle:.2f}"
    return line


def cases(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    threads = torch.get_num_threads()
    for how, dtype, batch in product(options.how, options.dtypes, options.batches):
        values = (name, options.share, options.side, options.device, threads, dtype, batch, how)
        if how != "graph" or options.device != "cpu":
            yield dict(zip(KEY, values, strict=True))


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEY)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU (2)")
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="these networks")
    parser.add_argument("--share", type=float, default=0.5, help="of the channels that are dead (0.5)")
    parser.add_argument("--side", type=int, default=224, help="of the images, in pixels (224)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sample", type=float, default=0.02, help="seconds of one sample, one call at least (0.02)")
    parser.add_argument("--how", nargs="+", choices=HOWS, default=list(HOWS), help="(all; a graph is for a GPU)")
    parser.add_argument("--compile-seconds", type=float, default=150, help="limit for each network (150)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--in-turns", type=Path, metavar="FILE", help="who has the same one does not measure meanwhile")
    parser.add_argument("--out", type=Path, help="a CSV file; what it has is not measured again")
    return parser.parse_args()


def main() -> int:
    options, started = parse(), time.perf_counter()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    print(machine(), flush=True)
    shortest.begin()  # as a first call on a GPU does, and a thousand on a CPU
    rows: list[dict[str, Any]] = list(rows_of(options.out))
    done = {key_of(each) for each in rows}
    for name in options.only:
        todo = [case for case in cases(name, options) if key_of(case) not in done]
        found = contenders(name, options) if todo and time.perf_counter() - started < options.seconds else {}
        for case in todo:
            if time.perf_counter() - started > options.seconds:
                print(f"out of time before {key_of(case)}", flush=True)
                break
            for each in measure(case, found, options):
                rows.append(each)
                if options.out is not None:
                    append(options.out, each)
                print(*(each[column] for column in SHOWN), flush=True)
    print(markdown({column: each[column] for column in SHOWN} for each in rows))
    slow = [each for each in rows if each["who"] == "small" and each["to ideal"] and float(each["to ideal"]) > BOUND]
    for each in slow:
        print(f"slower than {BOUND} times the ideal: {key_of(each)}: {each['to ideal']}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
