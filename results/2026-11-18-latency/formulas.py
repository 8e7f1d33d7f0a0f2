"""The two formulas that torch.compile is given on a CPU, against F.layer_norm: python formulas.py ROWSxWIDTH ...

A compiled function has six norms of few entries, each with rows of its own, for a call alone takes longer than one of
them; or one of many, for fresh memory takes longer than six. All take turns, ratios are medians of 30 rounds.
"""

import sys
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import torch
from timing import interleaved
from torch.nn import functional as F

from squeeze_release.modules import formulas


def compiled(formula):
    def run(xs, weight, bias, statistics):
        if formula is None:
            return [F.layer_norm(x, x.shape[-1:], weight, bias) for x in xs]
        wide = [formula(x.float(), x.shape[-1], statistics, 1e-5) for x in xs]
        return [(y * weight + bias).to(weight.dtype) for y in wide]

    # A function of its own for each: networks that share code look through each other's at every call.
    exec(compile("def call(*given): return run(*given)", __file__, "exec"), scope := {"run": run})
    return torch.inference_mode()(torch.compile(scope["call"], dynamic=False))


torch.set_num_threads(2)
ways = {"F.layer_norm": None, "inside two sums": formulas._of_few_rows, "in two sums": formulas._of_many_rows}
for dtype in (torch.bfloat16, torch.float32):
    for size in sys.argv[1:]:
        rows, width = map(int, size.split("x"))
        xs = [torch.randn(rows, width, dtype=dtype) for _ in range(6 if rows * width <= formulas.FEW else 1)]
        weight, bias = torch.randn(2, width, dtype=dtype)
        statistics = torch.tensor([width, 0.3, 0.7 * width], dtype=torch.float64)
        calls = {name: partial(compiled(formula), xs, weight, bias, statistics) for name, formula in ways.items()}
        for call in calls.values():
            call()
        times = interleaved(calls, False, 30, 0.01)
        plain = times["F.layer_norm"]
        ratios = [f"{name} {median(map(float.__truediv__, times[name], plain)):.2f}" for name in list(ways)[1:]]
        microseconds = 1e6 * median(plain) / len(xs)
        print(f"{dtype} {rows} x {width}: F.layer_norm {microseconds:.1f} us;", ", ".join(ratios), flush=True)
