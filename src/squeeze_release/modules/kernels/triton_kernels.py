"""The Triton kernels of `fused.py`, which has their algebra. Imported only where there is a GPU for them.

A program holds ROWS rows of BLOCK >= width columns in registers, so each tensor is read and written once. The width
comes as `groups` times the constant MULTIPLE: the compiler sees how rows are aligned, one kernel serves many widths.
Numbers are not specialised on, so that a kernel is found by what `fused.py` knows without a look at each of them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "groups", "pixels"])
def forward(
    x_at, weight_at, bias_at, y_at, stats_at, rows, groups, pixels, removed_mean, removed_share, cross, base, inverse,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, STATS: tl.constexpr, FIRST: tl.constexpr,
    MULTIPLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y, and mean and 1 / sigma of each row where a backward may follow.

    FIRST: x lies channel by channel, as images do, of `pixels` each; y never does.
    """
    width = groups * MULTIPLE
    columns = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (columns < width)[None, :]
    places = row.to(tl.int64)[:, None] * width + columns[None, :]
    x_places = places
    if FIRST:
        image, pixel = (row // pixels).to(tl.int64), row % pixels
        x_places = (image * width * pixels + pixel)[:, None] + columns.to(tl.int64)[None, :] * pixels
    x = tl.load(x_at + x_places, mask=inside, other=0.0).to(tl.float32)

    kept_mean = tl.sum(x, 1) / width
    shift = removed_mean - kept_mean
    y = tl.where(inside, x - kept_mean[:, None], 0.0)
    variance = tl.sum(y * y, 1) * inverse + (cross * shift * shift + base)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance))
    y = (y - (removed_share * shift)[:, None]) * rstd[:, None]
    if WEIGHT:
        y = y * tl.load(weight_at + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        y = y + tl.load(bias_at + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    tl.store(y_at + places, y.to(y_at.dtype.element_ty), mask=inside)
    if STATS:
        tl.store(stats_at + 2 * row, kept_mean + removed_share * shift, mask=row < rows)
        tl.store(stats_at + 2 * row + 1, rstd, mask=row < rows)


@triton.jit
def _normal(x_at, dy_at, stats_at, places, inside, row, rows):
    """Of a tile: dy and the normalised x, 0 where there is nothing; and 1 / sigma of its rows."""
    x = tl.load(x_at + places, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_at + places, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(stats_at + 2 * row, mask=row < rows, other=0.0)
    rstd = tl.load(stats_at + 2 * row + 1, mask=row < rows, other=0.0)
    return dy, tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0), rstd


@triton.jit
def _to_x(g, normal, rstd, inverse):
    """dx of whole rows, of g = dy times the weight."""
    along_mean = tl.sum(g, 1) * inverse
    along_sigma = tl.sum(g * normal, 1) * inverse
    return (g - along_mean[:, None] - normal * along_sigma[:, None]) * rstd[:, None]


@triton.jit(do_not_specialize=["rows", "groups"])
def backward(
    x_at, dy_at, weight_at, stats_at, dx_at, parts_at, rows, groups, inverse,
    WEIGHT: tl.constexpr, PARTS: tl.constexpr, MULTIPLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx, and of each program the sums over its rows that become the gradients of weight and bias."""
    width = groups * MULTIPLE
    columns = tl.arange(0, BLOCK)
    within = columns < width
    if WEIGHT:
        weight = tl.load(weight_at + columns, mask=within, other=0.0).to(tl.float32)[None, :]
    if PARTS:
        to_weight = tl.zeros([ROWS, BLOCK], tl.float32)
        to_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & within[None, :]
        places = row.to(tl.int64)[:, None] * width + columns[None, :]
        dy, normal, rstd = _normal(x_at, dy_at, stats_at, places, inside, row, rows)
        if PARTS:
            to_weight += dy * normal
            to_bias += dy
        g = dy
        if WEIGHT:
            g = dy * weight
        dx = _to_x(g, normal, rstd, inverse)
        tl.store(dx_at + places, dx.to(dx_at.dtype.element_ty), mask=inside)
    if PARTS:
        part = parts_at + tl.program_id(0) * width + columns
        tl.store(part, tl.sum(to_weight, 0), mask=within)
        tl.store(part + tl.num_programs(0) * width, tl.sum(to_bias, 0), mask=within)


@triton.jit(do_not_specialize=["parts", "width"])
def total(
    parts_at, to_weight_at, to_bias_at, parts, width,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The parts of all programs, summed in a fixed order: gradients are the same in every run."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    which = tl.program_id(1)
    sums = tl.zeros([DEPTH, COLUMNS], tl.float32)
    for first in range(0, parts, DEPTH):
        part = first + tl.arange(0, DEPTH)
        places = (which * parts + part)[:, None] * width + columns[None, :]
        sums += tl.load(parts_at + places, mask=(part < parts)[:, None] & within[None, :], other=0.0)
    gradient = tl.sum(sums, 0)
    if WEIGHT:  # noqa: SIM102  known to the compiler, and the next only to the program
        if which == 0:
            tl.store(to_weight_at + columns, gradient.to(to_weight_at.dtype.element_ty), mask=within)
    if BIAS:  # noqa: SIM102
        if which == 1:
            tl.store(to_bias_at + columns, gradient.to(to_bias_at.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["rows", "groups"])
def backward_at_once(
    x_at, dy_at, weight_at, stats_at, dx_at, to_weight_at, to_bias_at, rows, groups, inverse,
    WEIGHT: tl.constexpr, TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr, MULTIPLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """All gradients, of few rows: some programs sum up columns, the others have rows, and none waits for another.

    x and dy are read twice, the second time from a cache: that takes less time than another kernel.
    """
    width = groups * MULTIPLE
    summing = tl.cdiv(width, COLUMNS) if TO_WEIGHT or TO_BIAS else 0
    if tl.program_id(0) < summing:
        _sum_columns(x_at, dy_at, stats_at, to_weight_at, to_bias_at, rows, width, TO_WEIGHT, TO_BIAS, DEPTH, COLUMNS)
    else:
        row = (tl.program_id(0) - summing) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK)
        within = columns < width
        inside = (row < rows)[:, None] & within[None, :]
        places = row.to(tl.int64)[:, None] * width + columns[None, :]
        g, normal, rstd = _normal(x_at, dy_at, stats_at, places, inside, row, rows)
        if WEIGHT:
            g = g * tl.load(weight_at + columns, mask=within, other=0.0).to(tl.float32)[None, :]
        dx = _to_x(g, normal, rstd, inverse)
        tl.store(dx_at + places, dx.to(dx_at.dtype.element_ty), mask=inside)


@triton.jit
def _sum_columns(
    x_at, dy_at, stats_at, to_weight_at, to_bias_at, rows, width,
    TO_WEIGHT: tl.constexpr, TO_BIAS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    to_weight = tl.zeros([DEPTH, COLUMNS], tl.float32)
    to_bias = tl.zeros([DEPTH, COLUMNS], tl.float32)
    for first in range(0, rows, DEPTH):
        row = first + tl.arange(0, DEPTH)
        inside = (row < rows)[:, None] & within[None, :]
        places = row.to(tl.int64)[:, None] * width + columns[None, :]
        dy, normal, _ = _normal(x_at, dy_at, stats_at, places, inside, row, rows)
        to_weight += dy * normal
        to_bias += dy
    if TO_WEIGHT:
        tl.store(to_weight_at + columns, tl.sum(to_weight, 0).to(to_weight_at.dtype.element_ty), mask=within)
    if TO_BIAS:
        tl.store(to_bias_at + columns, tl.sum(to_bias, 0).to(to_bias_at.dtype.element_ty), mask=within)
