"""The tables of a README from what `latency.py` measured. Of a case that several files have, the last one counts.

python benchmarks/latency_tables.py FOLDER/gpu.csv FOLDER/compiled.csv --out results/DATE-latency/gpu.csv
"""

from __future__ import annotations

import argparse
from pathlib import Path

from latency_nets import NETWORKS, PEERS
from timing import append, markdown, rows_of

HOWS = ("graph", "eager", "compiled")
CASE = ("how", "network", "side", "batch", "dtype")
Row = dict[str, str]


def merged(paths: list[Path]) -> dict[tuple[str, ...], dict[str, Row]]:
    """Rows of each case, by who they are of."""
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for path in paths:
        of_file: dict[tuple[str, ...], dict[str, Row]] = {}
        for row in rows_of(path):
            of_file.setdefault(tuple(row[name] for name in CASE), {})[row["who"]] = row
        cases |= of_file
    return dict(sorted(cases.items(), key=place))


def place(item: tuple[tuple[str, ...], object]) -> tuple[int, int, int, int, bool]:
    how, network, side, batch, dtype = item[0]
    return HOWS.index(how), list(NETWORKS).index(network), int(side), int(batch), dtype != "float32"


def line(case: tuple[str, ...], rows: dict[str, Row]) -> Row:
    how, network, side, batch, dtype = case
    small = rows["small"]
    columns = {
        "": network,
        "side": side,
        "batch": batch,
        "dtype": dtype,
        "masked, ms": rows["masked"]["ms"],
        "small, ms": small["ms"],
        "faster": small["speedup"],
        "small / ideal": f"{small['to ideal']} ({small['to ideal low']} to {small['to ideal high']})",
    }
    return columns if how == "compiled" else columns | {peer: of_peer(rows.get(peer)) for peer in PEERS}


def of_peer(row: Row | None) -> str:
    if row is None or not row["ms"]:
        return "fails"
    return f"{row['ms']} ms, error {row['error']}, {int(row['parameters']):,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.csv")
    parser.add_argument("--out", type=Path, help="a CSV file for all rows that count")
    options = parser.parse_args()
    cases = merged(options.files)
    for how in HOWS:
        lines = [line(case, rows) for case, rows in cases.items() if case[0] == how]
        if len({each["side"] for each in lines}) == 1:
            lines = [{name: text for name, text in each.items() if name != "side"} for each in lines]
        if lines:
            print(f"\n{how}:\n\n{markdown(lines)}")
    if options.out is not None:
        options.out.unlink(missing_ok=True)
        for rows in cases.values():
            for row in rows.values():
                append(options.out, row)


if __name__ == "__main__":
    main()
