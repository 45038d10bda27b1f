"""The file map of docs/ARCHITECTURE.md has every module in it, and none that is gone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support.docs import ROOT

MAP: Final = (ROOT / "docs" / "ARCHITECTURE.md").read_text("utf-8").split("### File map")[1].split("```")[1]
#: Rooms of which the map says nothing but what they are.
_WHOLE: Final = ("cli", "dev")
#: Leaf values that stand in the table of rooms, above the map.
_LEAVES: Final = ("types.py", "errors.py", "logs.py", "addresses.py")
ROOMS: Final = (
    "proxy/fencepost_proxy",
    "policies/fencepost_policies",
    "client/fencepost",
)


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_is_in_the_map(room: str) -> None:
    there = [each.relative_to(ROOT / room) for each in (ROOT / room).rglob("*.py") if not each.name.startswith("__")]
    assert there
    missing = [
        str(each)
        for each in there
        if each.parts[0] not in (*_WHOLE, *_LEAVES) and not re.search(rf"(?<![\w./]){_called(room, each)}\b", MAP)
    ]
    assert missing == []


def _called(room: str, module: Path) -> str:
    """Modules of the proxy by their rooms, since several have one name."""
    return str(module) if room.endswith("_proxy") else module.name


def test_what_the_map_names_is_there() -> None:
    named = set(re.findall(r"[\w/]+\.(?:py|css|js)\b", MAP))
    assert len(named) > 80
    gone = [each for each in sorted(named) if not any(ROOT.glob(f"[pc]*/fencepost*/**/{each}"))]
    assert gone == []
