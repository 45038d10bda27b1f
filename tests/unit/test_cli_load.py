"""`fencepost load`: its units and positions, which have to be the same in every run."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from fencepost_proxy.cli import load as module
from fencepost_proxy.cli.load import Source, _BadLine, _in_order


def _values(source: Source, position: bytes | None = None) -> list[list[bytes | None]]:
    return [[row.value for row in rows] for rows, _ in source.read(position)]


def _files(directory: Path) -> list[Path]:
    """250 lines, none, and 30 compressed ones."""
    first, none, last = directory / "part-1", directory / "part-2", directory / "part-10.gz"
    first.write_text("".join(f"first {n}\r\n\n" for n in range(250)))
    none.write_text("\n")
    last.write_bytes(gzip.compress(b"".join(b"last %d\n" % n for n in range(29)) + b"unterminated"))
    return [first, none, last]


def test_units_are_of_one_file_and_continue_at_each_position(tmp_path: Path) -> None:
    source = Source(_files(tmp_path), None)
    whole = list(source.read(None))
    assert [len(rows) for rows, _ in whole] == [100, 100, 50, 30]
    assert (whole[0][0][0].value, whole[-1][0][-1].value) == (b"first 0", b"unterminated")
    assert whole[2][1] == b"%d part-1" % sum(len(f"first {n}\r\n") + (n < 249) for n in range(250))
    for number, (_, position) in enumerate(whole):
        assert list(source.read(position)) == whole[number + 1 :]


def test_units_of_stdin_are_counted_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"".join(b"line %d\n\n" % n for n in range(150))

    def read(position: bytes | None) -> list[tuple[list[bytes | None], bytes]]:
        monkeypatch.setattr(module.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
        return [([row.value for row in rows], at) for rows, at in Source([], None).read(position)]

    whole = read(None)
    assert [(len(rows), at) for rows, at in whole] == [(100, b"100"), (50, b"150")]
    assert read(b"100") == whole[1:]
    assert read(b"150") == []


def test_key_is_a_field_of_the_line(tmp_path: Path) -> None:
    (file := tmp_path / "x.jsonl").write_text('{"k": "a"}\n{"k": 7}\n{"k": null}\n{"k": {"b": 1}}\n')
    [(rows, _)] = Source([file], "k").read(None)
    assert [(row.key, row.value) for row in rows][:2] == [(b"a", b'{"k": "a"}'), (b"7", b'{"k": 7}')]
    assert [row.key for row in rows][2:] == [b"null", b'{"b":1}']
    for line in ("x", "[1]", '{"j": 1}', "7"):
        file.write_text(f'{{"k": 1}}\n{line}\n')
        with pytest.raises(_BadLine, match=r"line 2 of x\.jsonl is not a JSON object with the field k"):
            list(Source([file], "k").read(None))


def test_what_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _files(tmp_path)
    with pytest.raises(_BadLine, match="has come to part-3, which is not among the files"):
        list(Source(files, None).read(b"7 part-3"))
    with pytest.raises(_BadLine, match="two files have the same name"):
        list(Source([files[0], files[0]], None).read(None))
    monkeypatch.setattr(module, "_LINE_BYTES_MAX", 8)
    with pytest.raises(_BadLine, match="a line of part-1 is longer than 8 bytes"):
        list(Source(files, None).read(None))


def test_files_are_in_the_order_of_their_numbers() -> None:
    names = ["part-10", "part-9", "a", "part-2", "part-2b"]
    assert [str(each) for each in sorted(map(Path, names), key=_in_order)] == [
        "a",
        "part-2",
        "part-2b",
        "part-9",
        "part-10",
    ]
