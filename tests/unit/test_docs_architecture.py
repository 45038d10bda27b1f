"""The file map of docs/ARCHITECTURE.md has exactly the existing modules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support.docs import ROOT

_WRITTEN: Final = (ROOT / "docs" / "ARCHITECTURE.md").read_text("utf-8").split("### File map")[1].split("```")[1]
#: With `package/{one,other}.py` as two paths.
MAP: Final = re.sub(
    r"([\w/]+)/\{([\w,]+)\}\.py", lambda m: ", ".join(f"{m[1]}/{each}.py" for each in m[2].split(",")), _WRITTEN
)
#: Packages that the map does not list by module.
_WHOLE: Final = ("cli",)
#: Modules in the table above the map.
_LEAVES: Final = ("types.py", "errors.py", "executor.py", "native_view.py", "logs.py", "addresses.py")
PACKAGES: Final = (
    "proxy/fencepost_proxy",
    "policies/fencepost_policies",
    "client/fencepost",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_in_the_map(package: str) -> None:
    there = [
        each.relative_to(ROOT / package) for each in (ROOT / package).rglob("*.py") if not each.name.startswith("__")
    ]
    assert there
    missing = [
        str(each)
        for each in there
        if each.parts[0] not in (*_WHOLE, *_LEAVES) and not re.search(rf"(?<![\w./]){_called(package, each)}\b", MAP)
    ]
    assert missing == []


def _called(package: str, module: Path) -> str:
    """The proxy has modules of the same name in several packages."""
    return str(module) if package.endswith("_proxy") else module.name


def test_what_the_map_names_is_there() -> None:
    named = set(re.findall(r"[\w/]+\.(?:py|css|js)\b", MAP))
    assert len(named) > 80
    gone = [each for each in sorted(named) if not any(ROOT.glob(f"[pc]*/fencepost*/**/{each}"))]
    assert gone == []
