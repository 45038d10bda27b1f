"""Draws the chart of the docs from a result: one panel per measure, one bar per route. Returns SVG; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.results import (
    ADDED_P50,
    CPU_PER_GB,
    DIRECT,
    P99,
    Report,
    Row,
    is_product,
    number,
)


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    better: str
    table: str
    measure: str


PANELS = (
    Panel("Produce, MiB/s", "more is better", "produce", "MiB/s"),
    Panel("Consume, MiB/s", "more is better", "consume", "MiB/s"),
    Panel("Produce: CPU, millicores per MB/s", "less is better", "produce", CPU_PER_GB),
    Panel("Consume: CPU, millicores per MB/s", "less is better", "consume", CPU_PER_GB),
    Panel("Added latency, p50, µs", "less is better", "one in flight", ADDED_P50),
    Panel("Latency, p99, µs", "less is better", "one in flight", P99),
    Panel("Memory, idle, MB", "less is better", "memory", "idle MB"),
    Panel("Memory per idle connection, KB", "less is better", "memory", "KB per idle connection"),
)

_COLUMNS = 2
_PANEL_WIDTH, _BAR_HEIGHT, _BAR_GAP = 480, 16, 8
_LABEL_WIDTH, _VALUE_WIDTH = 205, 70
_MARGIN, _TITLE_HEIGHT, _HEAD_HEIGHT = 24, 38, 64
#: Readable on light and dark pages: medium grey text, no background.
_STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #6e7781 }
.head { font-size: 17px; font-weight: 600 } .title { font-size: 13px; font-weight: 600 }
.product { fill: #2f81f7 } .other { fill: #8b949e } .direct { fill: #57ab5a }
.range { stroke: #6e7781; stroke-width: 1.5 }
""".strip()


def svg(report: Report) -> str:
    """The chart. Panels without rows are omitted."""
    panels = [(panel, rows) for panel in PANELS if (rows := _rows_of(report.rows, panel))]
    parts = []
    y = _HEAD_HEIGHT
    for first in range(0, len(panels), _COLUMNS):
        line = panels[first : first + _COLUMNS]
        for column, (panel, rows) in enumerate(line):
            parts.append(_panel(panel, rows, _MARGIN + column * (_PANEL_WIDTH + _MARGIN), y))
        y += _TITLE_HEIGHT + max(len(rows) for _, rows in line) * (_BAR_HEIGHT + _BAR_GAP) + _MARGIN
    width = _MARGIN + _COLUMNS * (_PANEL_WIDTH + _MARGIN)
    described = (
        f"{report.when}, {report.machine.get('cores', '?')} cores shared by client, proxy and Kafka; medians, min–max"
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" role="img" '
            f'aria-label="Kafka, direct and through proxies">',
            f"<style>{_STYLE}</style>",
            f'<text class="head" x="{_MARGIN}" y="28">Kafka, direct and through proxies</text>',
            f'<text x="{_MARGIN}" y="46">{escape(described)}</text>',
            *parts,
            "</svg>\n",
        )
    )


def _rows_of(rows: Iterable[Row], panel: Panel) -> list[Row]:
    return [row for row in rows if (row.table, row.measure) == (panel.table, panel.measure)]


def _panel(panel: Panel, rows: Sequence[Row], x: int, y: int) -> str:
    top = max((*(max(row.values) for row in rows), 1e-9))
    bar_width_max = _PANEL_WIDTH - _LABEL_WIDTH - _VALUE_WIDTH
    parts = [
        f'<text class="title" x="{x}" y="{y + 12}">{escape(panel.title)}</text>',
        f'<text x="{x + _PANEL_WIDTH}" y="{y + 12}" text-anchor="end">{panel.better}</text>',
    ]
    at = y + _TITLE_HEIGHT - 14
    for row in rows:
        # Added latency may be slightly negative.
        length = max(1.0, bar_width_max * row.median / top)
        low, high = (
            x + _LABEL_WIDTH + max(0.0, bar_width_max * value / top) for value in (min(row.values), max(row.values))
        )
        middle = at + _BAR_HEIGHT / 2
        parts += [
            f'<text x="{x + _LABEL_WIDTH - 8}" y="{at + 12}" text-anchor="end">{escape(row.route)}</text>',
            f'<rect class="{_kind(row.route)}" x="{x + _LABEL_WIDTH}" y="{at}" width="{length:.1f}" '
            f'height="{_BAR_HEIGHT}" rx="2"/>',
        ]
        if high > low:
            parts.append(f'<path class="range" d="M{low:.1f} {middle}H{high:.1f}"/>')
        end = max(high, x + _LABEL_WIDTH + length)
        parts.append(f'<text x="{end + 6:.1f}" y="{at + 12}">{number(row.median)}</text>')
        at += _BAR_HEIGHT + _BAR_GAP
    return "\n".join(parts)


def _kind(route: str) -> str:
    if is_product(route):
        return "product"
    return "direct" if route == DIRECT else "other"
