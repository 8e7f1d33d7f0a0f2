"""The report page: one HTML file that needs nothing else, for a squeeze, a run, a measurement, or all of them.

What there is goes into a `Contents`; every part of the page is a function of it.

    contents.py, headline.py, sections.py          what there is, and the parts of the page: read these first
    run_files.py, stored_layers.py, benchmark.py   what files and objects say, as plain data
    run_charts.py, charts.py, legend.py            curves
    drawing.py, groups.py                          the network, layer by layer
    tables.py, markup.py, formats.py               tables, HTML that is escaped, numbers as people read them
    environment.py                                 where the page was written
    page.html, style.css, page.js                  the frame, the looks, and a click that sorts
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ..errors import InputError
from ..report import Report
from .benchmark import read_bench
from .contents import Contents
from .run_files import read_run
from .sections import page_body


def write_page(
    path: str | Path,
    *,
    report: Report | None = None,
    run_dir: str | Path | None = None,
    bench: Any = None,
    command: str = "",
) -> None:
    """Write a page about a squeeze, a run, a measurement, or several of them; what is not given is not on the page.

    Args:
        report: what `squeeze` returned beside the model.
        run_dir: the folder of a run of `cycle`, finished or not.
        bench: what `bench` returned.
        command: how all this was made. Of absolute paths in it only the last part is shown.
    """
    if report is None and run_dir is None and bench is None:
        raise InputError(
            "there is nothing to write about",
            where="write_page(...)",
            consequence="no page was written",
            remedy="give report=, run_dir= or bench=",
        )
    run = read_run(run_dir) if run_dir is not None else None
    contents = Contents(report, run, read_bench(bench) if bench is not None else None, command)
    text = _page(contents)
    try:
        Path(path).write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
        raise InputError(
            f"{Path(path).name} cannot be written: {error.strerror}",
            where=str(Path(path).parent),
            consequence="no page was written",
            remedy="give a file in a folder that is there and can be written to",
        ) from error


def _page(contents: Contents) -> str:
    """No script runs but the one whose digest is in the head, and nothing is fetched from anywhere."""
    script = _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    frame = Template(_file("page.html"))
    return frame.substitute(digest=digest, style=_file("style.css"), body=page_body(contents), script=script)


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")
