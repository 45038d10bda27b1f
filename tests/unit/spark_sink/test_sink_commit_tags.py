"""What the sink stores in the log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fencepost.spark.commit_tags import CommitTag
from fencepost.spark.errors import SinkError

MARK = CommitTag("s", "q", "r", 7, 3, "a", 0, 100, 40, 6, 3, False, 1_700_000_000_000, {0: 2, 11: 1})


@pytest.mark.parametrize(
    "commit_tag",
    [MARK, replace(MARK, task_appends=None, arranged=True, query=""), replace(MARK, done=(3, (1 << 64) - 1))],
)
def test_commit_tag_decodes_to_what_was_encoded(commit_tag: CommitTag) -> None:
    assert CommitTag.decode(commit_tag.encode()) == commit_tag
    assert len(commit_tag.encode()) < 300


@pytest.mark.parametrize("header", [b"", b"{}", b"[]", b"\xff", MARK.encode().replace(b'"batch":7,', b"")])
def test_unreadable_commit_tag_raises(header: bytes) -> None:
    with pytest.raises(SinkError, match="cannot read"):
        CommitTag.decode(header)


def test_newer_commit_tag_version_requires_newer_sink() -> None:
    with pytest.raises(SinkError, match="newer fencepost"):
        CommitTag.decode(MARK.encode().replace(b'"v":1', b'"v":2'))
