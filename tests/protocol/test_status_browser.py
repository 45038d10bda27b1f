"""The status page in a real browser, if there is one: it loads its files and data, and its policy allows them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fencepost_proxy.observability.status import CheckedTopicStatus, StatusSnapshot
from fencepost_proxy.types import Address
from tests.support.page import Reader
from tests.support.status import REQUIRED, status_page

_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_SNAPSHOT = StatusSnapshot(version="1.2.3", uptime_seconds=1.0, cluster_id="c", bootstrap=Address("proxy", 19092))
_TOPIC = CheckedTopicStatus("<script>document.title = 'taken'</script>", REQUIRED, 6)


@pytest.mark.skipif(_CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize(("path", "title"), [("/", "✓ Healthy"), ("/topics?search=script", "Checked topics")])
def test_browser_shows_names_as_text(path: str, title: str, tmp_path: Path) -> None:
    with status_page(_SNAPSHOT, {"topics": (_TOPIC,)}) as address:
        shown = Reader(_dom(f"http://{address}{path}", tmp_path))
    assert shown.title == f"{title} – Fencepost"
    assert _TOPIC.topic in shown.text
    assert [attributes for tag, attributes in shown.tags if tag == "script"] == [{"type": "module", "src": "/page.js"}]


def _dom(url: str, profile: Path) -> str:
    """The document after its script has run."""
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=3000",
    )
    assert _CHROMIUM is not None
    done = subprocess.run(
        [_CHROMIUM, *options, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout
