"""`make fuzz N=10000 J=2`: random networks with random masks, and no wrong result.

Every network comes from one integer. Those that fail are listed by it at the end, and
`python tests/fuzz.py --seed 1234` builds that network again, prints it, and shows what went wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from attack import Failure, attack_all
from networks import case_of

import squeeze_release as sr

SECONDS = 120  # one network takes less than one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=200, help="how many networks")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one, with its network and the traceback")
    parser.add_argument("--out", type=Path, help="write tally and failures there, as JSON")
    wish = parser.parse_args()
    if wish.seed is not None:
        return show(wish.seed)
    started = time.perf_counter()
    tally, failures = run(range(wish.first, wish.first + wish.count), wish.jobs)
    seconds = time.perf_counter() - started
    print(f"{dict(tally)} in {seconds:.0f} s")
    for failure in failures:
        print(f"seed {failure['seed']}: {failure['story']}\n    {failure['details'][:300]}")
    kinds = Counter(failure["kind"] for failure in failures)
    print(f"{len(failures)} failures {dict(kinds)}" if failures else "no wrong result")
    if wish.out:
        found = {"tally": tally, "seconds": seconds, "kinds": kinds, "failures": failures, "torch": torch.__version__}
        wish.out.write_text(json.dumps(found, indent=1))
    return 1 if failures else 0


def run(seeds: range, jobs: int) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Small ranges of seeds, dealt to processes; progress on stderr."""
    parts = [seeds[i : i + 20] for i in range(0, len(seeds), 20)]
    tally: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_prepare) as pool:
        ranges = {pool.submit(work, part): part for part in parts}
        for done in as_completed(ranges):
            try:
                more, failed = done.result()
            except BrokenProcessPool as cause:
                more, failed = Counter(), [_failure(ranges[done][0], "crash", f"{ranges[done]}", str(cause))]
            tally += more
            failures += failed
            for failure in failed:
                print(f"\rseed {failure['seed']}: {failure['kind']}", file=sys.stderr)
            print(f"\r{tally['tried']}/{len(seeds)}, {len(failures)} failures ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return tally, sorted(failures, key=lambda failure: failure["seed"])


def _failure(seed: int, kind: str, story: str, details: str) -> dict[str, Any]:
    return {"seed": seed, "kind": kind, "story": story, "details": details}


def _prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _out_of_time)


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def work(seeds: range) -> tuple[Counter[str], list[dict[str, Any]]]:
    tally: Counter[str] = Counter()
    failures = []
    for seed in seeds:
        tally["tried"] += 1
        signal.alarm(SECONDS)
        story = ""
        try:
            case = case_of(seed)
            story = case.story
            tally += attack_all(case, seed)
        except Failure as failure:
            failures.append(_failure(seed, failure.kind, story, str(failure)))
        except sr.SqueezeError as refusal:
            tally[f"refused: {type(refusal).__name__}"] += 1
        except Exception:
            failures.append(_failure(seed, "crash", story, traceback.format_exc(limit=-3)))
        finally:
            signal.alarm(0)
    return tally, failures


def show(seed: int) -> int:
    case = case_of(seed)
    print(case)
    try:
        print(dict(attack_all(case, seed)))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
