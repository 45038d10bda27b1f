"""The generated part of docs/kafka-releases.md, between two markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fencepost_proxy.wire.apis import api_name
from tests.releases.story import Release, Versions

PAGE = Path(__file__).parents[2] / "docs" / "kafka-releases.md"
_BEGIN, _END = "<!-- made by python -m tests.releases --write -->\n", "<!-- end of what was made -->\n"
_NOTHING = "–"
_DIFFERENT = " → "


def made(releases: Sequence[Release]) -> str:
    return f"{story_table(releases)}\n\n## Versions of each API\n\n{_LEGEND}\n\n{api_table(releases)}\n"


_LEGEND = (
    "Versions that a broker of the release supports; after an arrow, those of the proxy if they differ (– none). "
    "APIs that no release supports are omitted. Reasons: [the table of APIs](api-table.md)."
)


def story_table(releases: Sequence[Release]) -> str:
    steps = list(dict.fromkeys(step for each in releases for step in each.observed))
    rows = [[step, *(each.observed.get(step, _NOTHING) for each in releases)] for step in steps]
    return _table(["step", *(each.version for each in releases)], rows)


def api_table(releases: Sequence[Release]) -> str:
    keys = sorted({key for each in releases for key in (*each.direct, *each.proxied)})
    rows = [[f"{key} {api_name(key)}", *(cell(each, key) for each in releases)] for key in keys]
    return _table(["API", *(each.version for each in releases)], rows)


def cell(release: Release, key: int) -> str:
    direct, proxied = _range(release.direct, key), _range(release.proxied, key)
    return direct if direct == proxied else direct + _DIFFERENT + proxied


def _range(versions: Versions, key: int) -> str:
    if key not in versions:
        return _NOTHING
    low, high = versions[key]
    return f"{low}–{high}" if high > low else f"{low}"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(each.replace("|", "\\|") for each in line) + " |" for line in lines)


def write(releases: Sequence[Release]) -> None:
    before, after = _parts(PAGE.read_text("utf-8"))
    PAGE.write_text(f"{before}{_BEGIN}\n{made(releases)}\n{_END}{after}", "utf-8")


def _parts(text: str) -> tuple[str, str]:
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert begin, f"{PAGE} has no line {_BEGIN!r}"
    assert end, f"{PAGE} has no line {_END!r}"
    return before, after


def documented(version: str) -> dict[int, str]:
    """API key → its cell in the page, for the APIs of the release."""
    lines = PAGE.read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    header = next(row for row in rows if row[0] == "API")
    at = header.index(version)
    below = rows[rows.index(header) + 1 :]
    return {int(row[0].split()[0]): row[at] for row in below if row[0][0].isdigit() and row[at] != _NOTHING}
