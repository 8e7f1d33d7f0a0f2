"""`squeeze-release squeeze`: a pruned checkpoint in, the small network out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench import Bench, bench
from ..export import Exported, export
from ..report import Report
from ..squeeze import squeeze as squeeze_model
from ..store import save
from .common import (
    ALL_RULES,
    CheckpointArgument,
    CompactionOption,
    DtypeOption,
    InputOption,
    JsonOption,
    KeepOption,
    ModelArgument,
    QuietOption,
    RulesOption,
    Speaker,
    check_output,
    network_and_call,
    write_page,
)


def squeeze(
    model: ModelArgument,
    checkpoint: CheckpointArgument,
    input: InputOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="the small network, for squeeze_release.load")],
    onnx: Annotated[Path | None, typer.Option(help="the small network as ONNX too")] = None,
    pt2: Annotated[Path | None, typer.Option(help="the small network for torch.export.load too")] = None,
    fixed_batch: Annotated[bool, typer.Option("--fixed-batch", help="export the batch of --input alone")] = False,
    tolerance: Annotated[float | None, typer.Option(min=0.0, help="how far exports may be off; 1e-5")] = None,
    report: Annotated[Path | None, typer.Option(help="an HTML page about it, with a short measurement")] = None,
    rules: RulesOption = ALL_RULES,
    compaction: CompactionOption = None,
    keep: KeepOption = None,
    dtype: DtypeOption = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="do not compare old and new in float64")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Make a pruned checkpoint really smaller, without changing what it computes.

    [bold]squeeze-release squeeze timm:convnext_tiny pruned.pt --input 1x3x224x224 -o small.safetensors[/bold]

    [bold]squeeze-release squeeze my.models:net pruned.pt --input 1x128:int64 -o s.safetensors --onnx s.onnx[/bold]

    Ends with 0 when all is written, 1 after an error (which says what to do), 2 for wrong arguments.
    """
    speaker = Speaker(as_json=as_json, quiet=quiet)
    for path, option, suffix in ((out, "--out", None), (onnx, "--onnx", ".onnx"), (pt2, "--pt2", ".pt2")):
        check_output(path, option, suffix)
    check_output(report, "--report")
    network, (args, kwargs) = network_and_call(model, checkpoint, input, dtype, speaker)
    speaker.progress("squeezing")
    options: dict[str, Any] = {"keep": keep or [], "rules": rules.value, "compaction": compaction and compaction.value}
    small, found = squeeze_model(network, args, kwargs, verify=not no_verify, **options)
    speaker.progress(f"writing {out}")
    save(small, out)
    exported = []
    for path in (path for path in (onnx, pt2) if path is not None):
        speaker.progress(f"writing {path}")
        exported.append(export(small, args, path, kwargs, dynamic_batch=not fixed_batch, tolerance=tolerance))
    measured = None
    if report is not None:
        speaker.progress(f"measuring, and writing {report}")
        measured = bench({"masked": network, "squeezed": small}, args, kwargs, seconds=1.0)
        write_page(report, report=found, bench=measured)
    speaker.result(found, _data(found, out, exported, measured))


def _data(report: Report, out: Path, exported: list[Exported], measured: Bench | None) -> dict[str, Any]:
    files = [{"path": str(out), "bytes": out.stat().st_size}]
    files += [{"path": str(each.path), "bytes": each.bytes, "max_error": each.max_error} for each in exported]
    return {**report.to_dict(), "files": files} | ({} if measured is None else {"bench": measured.to_dict()})
