"""The tables of a run, for docs/foreign-tests.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.foreign.compare import Compared
from tests.foreign.explained import EXPLAINED
from tests.foreign.suites import FAILED, PASSED, SKIPPED, Outcomes

PAGE = Path(__file__).parents[2] / "docs" / "foreign-tests.md"
_BEGIN = "<!-- the tables of the last run of all suites -->\n"


def made(compared: Sequence[Compared], skipped: Mapping[str, str]) -> str:
    lines = [
        "| suite | version | what | tests | at Kafka | through the proxy | different |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in compared:
        counts = [_counted(outcomes) for outcomes in (each.direct, each.proxied)]
        row = (each.suite, each.version, each.what, len(each.direct), *counts, len(each.different))
        lines.append(f"| {' | '.join(map(str, row))} |")
    lines += [f"| {name} | not run: {reason} | | | | | |" for name, reason in skipped.items()]
    lines += ["", "| suite | test | at Kafka | through the proxy | why |", "|---|---|---|---|---|"]
    for each in compared:
        for test in each.different:
            why = EXPLAINED.get((each.suite, test), "**unexplained**")
            lines.append(f"| {each.suite} | `{test}` | {each.direct[test]} | {each.proxied[test]} | {why} |")
    if lines[-1].startswith("|---"):
        lines.append("| – | no test differs | | | |")
    failed = [f"{each.suite} `{test}`" for each in compared for test, outcome in sorted(each.direct.items())
              if outcome == each.proxied[test] == FAILED]  # fmt: skip
    lines += ["", f"Failed on both sides: {', '.join(failed) or 'none'}."]
    return "\n".join(lines) + "\n"


def _counted(outcomes: Outcomes) -> str:
    counts = Counter(outcomes.values())
    return ", ".join(f"{counts[each]} {each}" for each in (PASSED, FAILED, SKIPPED) if counts[each]) or "none"


def write(compared: Sequence[Compared], skipped: Mapping[str, str]) -> None:
    head, _, _ = PAGE.read_text().partition(_BEGIN)
    PAGE.write_text(f"{head}{_BEGIN}\n{made(compared, skipped)}")
