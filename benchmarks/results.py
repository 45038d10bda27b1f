"""Results of a run: rows, goals, and the texts of both result files. No I/O."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

#: The routes that are the product: `fencepost`, `fencepost, checks on`, …
PRODUCT = "fencepost"
DIRECT = "direct"
HAPROXY = "HAProxy (TCP)"
#: A minimal relay, measured to know what no proxy can go below.
FLOOR = "relay in C"


@dataclass(frozen=True, slots=True)
class Goal:
    """`limit` must be reached (`at_least`) or not be exceeded (`at_most`). `of`: what it was computed from."""

    kind: Literal["at_least", "at_most"]
    limit: float
    of: str = ""

    def met_by(self, value: float) -> bool:
        return value >= self.limit if self.kind == "at_least" else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.kind == 'at_least' else '≤'} {self.limit:.3g}" + (f" ({self.of})" if self.of else "")


def at_least(limit: float) -> Goal:
    return Goal("at_least", limit)


def at_most(limit: float) -> Goal:
    return Goal("at_most", limit)


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of one route.

    `table`: name of its table; `route`: its line; `measure`: its column, including the unit. `values`: one per
    repetition, in order; the median counts.
    """

    table: str
    route: str
    measure: str
    values: tuple[float, ...]
    goal: Goal | None = None
    remark: str = ""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"{self.table}, {self.route}, {self.measure}: a row without values")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        if len(self.values) == 1:
            return number(self.median)
        return f"{number(self.median)} ({number(min(self.values))}–{number(max(self.values))})"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "table": self.table,
            "route": self.route,
            "measure": self.measure,
            "median": self.median,
            "values": list(self.values),
        }
        if self.goal is not None:
            met = self.goal.met_by(self.median)
            found["goal"] = {"kind": self.goal.kind, "limit": self.goal.limit, "of": self.goal.of, "met": met}
        if self.remark:
            found["remark"] = self.remark
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        goal = found.get("goal")
        return cls(
            found["table"],
            found["route"],
            found["measure"],
            tuple(found["values"]),
            None if goal is None else Goal(goal["kind"], goal["limit"], goal.get("of", "")),
            found.get("remark", ""),
        )


def number(value: float) -> str:
    """At least two significant digits: 176, 0.91, 0.0123."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 0.1:
        return f"{value:.2f}"
    return f"{value:.3g}"


#: Table titles, in display order. Other tables come last.
TABLES: Mapping[str, str] = {
    "produce": "Produce, 1 KB records",
    "produce 100 B": "Produce, 100-byte records",
    "consume": "Consume",
    "one in flight": "One request in flight",
    "conditional": "Conditional append, one in flight",
    "pipelined": "Conditional append, several in flight",
    "idempotent": "Idempotent producer",
    "transactional": "Transactional producer",
    "read_committed": "read_committed consumer",
    "memory": "Memory",
    "start": "Start",
    "scaling": "Scaling: cost of the largest relative to the smallest",
}

OF_DIRECT = "of direct"
OF_UNCONDITIONAL = "of unconditional"
#: One second of CPU per 10⁹ bytes is one thousandth of a core per MB/s.
CPU_PER_GB = "millicores per MB/s"
CPU_PER_REQUEST = "CPU µs/request"
P50 = "p50 µs"
ADDED_P50 = "added p50 µs"
P99 = "p99 µs"

#: The product's goals, by table and measure.
GOALS: Mapping[tuple[str, str], Goal] = {
    ("produce 100 B", "of checks off"): at_least(0.95),
    ("conditional", OF_UNCONDITIONAL): at_least(0.90),
    ("pipelined", OF_UNCONDITIONAL): at_least(0.90),
    ("idempotent", OF_DIRECT): at_least(0.95),
    ("transactional", OF_DIRECT): at_least(0.95),
    ("read_committed", OF_DIRECT): at_least(0.95),
    ("memory", "idle MB"): at_most(40),
    ("memory", "KB per idle connection"): at_most(10),
    ("start", "s"): at_most(0.5),
}


@dataclass(frozen=True, slots=True)
class OfHaproxy:
    """A goal relative to HAProxy's figure of the same run, in the row of the same measure of `table`.

    `off`, `on`: factors with checks off and on, None for no goal; `less`: subtracted from a figure of which more is
    better.
    """

    table: str
    off: float | None = None
    on: float | None = None
    less: float | None = None

    def goal(self, route: str, value: float) -> Goal | None:
        if self.less is not None:
            return Goal("at_least", value - self.less, f"HAProxy − {self.less:g}")
        factor = self.off if route in (PRODUCT, f"{PRODUCT}, checks off") else self.on
        return None if factor is None else Goal("at_most", factor * value, f"{factor:g} × HAProxy")


#: By table and measure. Conditional appends are compared with HAProxy's unconditional ones.
GOALS_OF_HAPROXY: Mapping[tuple[str, str], OfHaproxy] = {
    ("produce", OF_DIRECT): OfHaproxy("produce", less=0.02),
    ("produce", CPU_PER_GB): OfHaproxy("produce", off=1.0, on=1.2),
    ("consume", CPU_PER_GB): OfHaproxy("consume", off=0.7),
    ("one in flight", ADDED_P50): OfHaproxy("one in flight", off=1.0, on=1.0),
    ("one in flight", CPU_PER_REQUEST): OfHaproxy("one in flight", off=1.0, on=1.15),
    ("conditional", P50): OfHaproxy("one in flight", on=1.0),
    ("conditional", CPU_PER_REQUEST): OfHaproxy("one in flight", on=1.15),
}
#: Columns of the comparison on the page: table, measure, heading.
COMPARED: Sequence[tuple[str, str, str]] = (
    ("produce", CPU_PER_GB, f"produce, {CPU_PER_GB}"),
    ("consume", CPU_PER_GB, f"consume, {CPU_PER_GB}"),
    ("one in flight", CPU_PER_REQUEST, CPU_PER_REQUEST),
    ("one in flight", ADDED_P50, ADDED_P50),
    ("one in flight", P99, P99),
    ("produce", OF_DIRECT, "produce, of direct"),
    ("consume", OF_DIRECT, "consume, of direct"),
    ("memory", "idle MB", "idle MB"),
    ("memory", "KB per idle connection", "KB/connection"),
    ("start", "s", "start s"),
)
#: Table and measure in which the product must be at least as good as every measured peer.
_PEER_GOAL = ("one in flight", P99)


def is_product(route: str) -> bool:
    return route == PRODUCT or route.startswith(f"{PRODUCT},")


def with_goals(rows: Iterable[Row], peers: Iterable[str]) -> list[Row]:
    """The rows. Rows of the product without a goal get theirs from `GOALS` and `GOALS_OF_HAPROXY`."""
    found = list(rows)
    haproxy = {(row.table, row.measure): row.median for row in found if row.route == HAPROXY}
    p99s = [row.median for row in found if (row.table, row.measure) == _PEER_GOAL and row.route in set(peers)]
    goals = dict(GOALS)
    if p99s:
        goals[_PEER_GOAL] = at_most(min(p99s))

    def goal(row: Row) -> Goal | None:
        key = row.table, row.measure
        relative = GOALS_OF_HAPROXY.get(key)
        if relative is None or (row.route == f"{PRODUCT}, checks on" and row.table == "conditional"):
            return goals.get(key)
        base = haproxy.get((relative.table, row.measure))
        return None if base is None else relative.goal(row.route, base)

    return [replace(row, goal=goal(row)) if row.goal is None and is_product(row.route) else row for row in found]


def ratios(mine: Sequence[float], base: Sequence[float]) -> tuple[float, ...]:
    """Ratios per round, because other load on the machine affects both values of a round."""
    return tuple(one / other for one, other in zip(mine, base, strict=True))


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run."""

    when: str
    command: str
    commit: str
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    #: Route → why it was not measured.
    missing: Mapping[str, str]
    rows: tuple[Row, ...] = ()
    #: Failed workloads. The others still run.
    failures: tuple[str, ...] = field(default=())
    #: Why its figures must not be published, if so.
    busy: str = ""

    def to_json(self) -> str:
        whole = {
            "when": self.when,
            "command": self.command,
            "commit": self.commit,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "settings": dict(self.settings),
            "missing": dict(self.missing),
            "failures": list(self.failures),
            "busy": self.busy,
            "rows": [row.to_json() for row in self.rows],
        }
        return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        whole = json.loads(text)
        rows = tuple(Row.from_json(row) for row in whole["rows"])
        kept = {key: value for key, value in whole.items() if key not in ("rows", "failures")}
        return cls(**kept, rows=rows, failures=tuple(whole["failures"]))

    @property
    def stem(self) -> str:
        """File name without extension."""
        return self.when.removesuffix(" UTC").replace(" ", "-").replace(":", "")

    def _head(self) -> list[str]:
        parts = []
        for title, facts in (("Machine", self.machine), ("Versions", self.versions)):
            parts += [f"{title}: " + "; ".join(f"{name} {value}" for name, value in facts.items()) + ".", ""]
        for route, why in self.missing.items():
            parts += [f"**Not measured: {route}** – {why}", ""]
        if self.busy:
            parts += [f"**Not for publication: {self.busy}**", ""]
        for failure in self.failures:
            parts += [f"**Failed: {failure}**", ""]
        return parts

    def to_summary(self) -> str:
        """Summary for the docs page: medians of the comparison, and the goals."""
        parts = [
            f"{self.when}: `{self.command}` at commit `{self.commit}`. Medians; GB is 10⁹ bytes. Ranges and all other "
            f"tables are in `benchmarks/results/{self.stem}.md`.",
            "",
            *self._head(),
        ]
        parts += ["### Comparison", "", *comparison_lines(self.rows), ""]
        return "\n".join([*parts, "### Goals", "", "Missed goals are bold.", "", *goal_summary(self.rows)])

    def to_markdown(self) -> str:
        parts = [f"# {self.when}", ""]
        parts += [
            f"`{self.command}` at commit `{self.commit}`. Median (min–max) of the repetitions; GB is 10⁹ bytes.",
            "",
            *self._head(),
        ]
        parts += ["## Goals", "", *goal_lines(self.rows), ""]
        for name in table_names(self.rows):
            parts += [f"## {TABLES.get(name, name)}", ""]
            if name in self.settings:
                parts += [self.settings[name], ""]
            parts += [*table_lines(self.rows, name), ""]
        return "\n".join(parts)


_FROM = "<!-- published:"
_TO = "<!-- … to here -->"


def published(page: str, report: Report, picture: str = "![Kafka, direct and through proxies](performance.svg)") -> str:
    """The page with this report's summary between its two marker lines. Raises ValueError if they are missing."""
    before, mark, rest = page.partition(_FROM)
    first_line, _, rest = rest.partition("\n")
    _, end, after = rest.partition(_TO)
    if not mark or not end:
        raise ValueError(f"the page lacks the lines {_FROM!r} and {_TO!r}")
    return f"{before}{mark}{first_line}\n{picture}\n\n{report.to_summary()}\n\n{end}{after}"


def table_names(rows: Iterable[Row]) -> list[str]:
    present = list(dict.fromkeys(row.table for row in rows))
    order = list(TABLES)
    return sorted(present, key=lambda name: order.index(name) if name in order else len(order))


def table_lines(rows: Iterable[Row], name: str) -> list[str]:
    """A Markdown table: a line per route, a column per measure."""
    mine = [row for row in rows if row.table == name]
    routes = list(dict.fromkeys(row.route for row in mine))
    measures = list(dict.fromkeys(row.measure for row in mine))
    cells = {(row.route, row.measure): str(row) for row in mine}
    lines = ["| | " + " | ".join(measures) + " |", "|---" * (len(measures) + 1) + "|"]
    lines += [
        f"| {route} | " + " | ".join(cells.get((route, each), "–") for each in measures) + " |" for route in routes
    ]
    remarks = [f"{row.route}, {row.measure}: {row.remark}" for row in mine if row.remark]
    return lines + (["", *(f"- {remark}" for remark in remarks)] if remarks else [])


def goal_lines(rows: Iterable[Row]) -> list[str]:
    lines = ["| | route | measure | goal | measured | |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row.goal is not None:
            decision = "met" if row.goal.met_by(row.median) else "**missed**"
            lines.append(f"| {row.table} | {row.route} | {row.measure} | {row.goal} | {row} | {decision} |")
    return lines


def comparison_lines(rows: Iterable[Row]) -> list[str]:
    """Medians of all routes. The line `checks off` includes the measures that do not depend on checks."""
    medians = {(row.table, row.route, row.measure): number(row.median) for row in rows}
    routes = list(dict.fromkeys(row.route for row in rows if row.table in ("produce", "consume")))
    whole = f"{PRODUCT}, checks off"
    if whole in routes:
        routes = [route for route in routes if route != PRODUCT]
    lines = ["| | " + " | ".join(heading for _, _, heading in COMPARED) + " |", "|---" * (len(COMPARED) + 1) + "|"]
    for route in routes:
        names = (route, PRODUCT) if route == whole else (route,)
        cells = [
            next((medians[table, name, measure] for name in names if (table, name, measure) in medians), "–")
            for table, measure, _ in COMPARED
        ]
        lines.append(f"| {route} | {' | '.join(cells)} |")
    return lines


def goal_summary(rows: Iterable[Row]) -> list[str]:
    """A line per goal, with the medians of its routes."""
    found: dict[tuple[str, str, Goal], list[str]] = {}
    for row in rows:
        if row.goal is not None:
            median = number(row.median) if row.goal.met_by(row.median) else f"**{number(row.median)}**"
            route = row.route.removeprefix(PRODUCT).removeprefix(", ")
            found.setdefault((row.table, row.measure, row.goal), []).append(f"{route} {median}".strip())
    lines = ["| workload | measure | goal | measured |", "|---|---|---|---|"]
    return lines + [
        f"| {table} | {measure} | {goal} | {'; '.join(cells)} |" for (table, measure, goal), cells in found.items()
    ]
