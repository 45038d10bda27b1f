"""Defects of native code that the tests must detect: edits of `native/src`, each built and run by `check.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
#: Quicker to build than the module that is installed, and as correct.
_PROFILE = {"CARGO_PROFILE_RELEASE_LTO": "off", "CARGO_PROFILE_RELEASE_OPT_LEVEL": "1"}
_LIBRARY = "release/libfencepost_native.dylib" if sys.platform == "darwin" else "release/libfencepost_native.so"


class EditDoesNotApply(Exception):
    """The source has changed."""


@dataclass(frozen=True)
class NativeMutant:
    """`edits`: file in `native/src`, what it has exactly once, and what replaces it."""

    name: str
    edits: tuple[tuple[str, str, str], ...]

    def sources(self) -> dict[str, str]:
        """The changed files. Raises EditDoesNotApply."""
        changed: dict[str, str] = {}
        for file, old, new in self.edits:
            source = changed.get(file) or (NATIVE / "src" / file).read_text("utf-8")
            if source.count(old) != 1:
                raise EditDoesNotApply(
                    f"{self.name}: native/src/{file} has {source.count(old)} times `{old}`, not once"
                )
            changed[file] = source.replace(old, new)
        return changed


def build(directory: Path, mutant: NativeMutant | None) -> Path:
    """The folder of the module, built in `directory`, whose `target` is used again. None: without a defect."""
    package = directory / "native"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(NATIVE, package, ignore=shutil.ignore_patterns("target", "*.so"))
    for file, source in ({} if mutant is None else mutant.sources()).items():
        (package / "src" / file).write_text(source, "utf-8")
    (package / "src" / "lib.rs").touch()  # else Cargo may keep what it built of other sources before
    environment = {**os.environ, **_PROFILE, "CARGO_TARGET_DIR": str(directory / "target")}
    command = ["cargo", "build", "--release", "--locked", "--quiet"]
    built = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
    if built.returncode:
        raise RuntimeError(f"{mutant} does not compile:\n{built.stderr}")
    shutil.copy(directory / "target" / _LIBRARY, package / "fencepost_native.abi3.so")
    return package


def found(package: Path) -> str | None:
    """What `check.py` finds with this module; None if nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(package), *sys.path))}
    environment.pop("FENCEPOST_NATIVE", None)
    command = [sys.executable, "-m", "tests.native_mutants.check", str(package)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or bool(done.stdout) != bool(done.returncode):
        raise RuntimeError(f"the check itself failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return done.stdout.strip() if done.returncode else None


_ADMITS_LIVE = ("permit.rs", "if !self.live || self.in_flight.len()", "if self.in_flight.len()")
_LIVE = ("appends.rs", "is_some_and(|permit| permit.borrow(py).is_live())", "is_some()")

MUTANTS = [
    NativeMutant(name, edits)
    for name, *edits_of in [
        (
            "Fetch responses are relayed unread",
            (
                "responses.rs",
                "FETCH => sent.version < FETCH_ENDPOINTS_FROM || fetch::names_no_broker(frame),",
                "FETCH => sent.version >= 0,",
            ),
        ),
        (
            "tagged fields after the records are not noticed",
            (
                "fetch.rs",
                "    no_tagged_fields(&mut cursor)?;\n    (cursor.at == frame.len())",
                "    (cursor.at < frame.len())",
            ),
        ),
        (
            "appends have no fence",
            ("batch.rs", "if let Some(fence) = fence {", "if let Some(fence) = fence.filter(|_| false) {"),
        ),
        (
            "the sequence offset is ignored",
            ("permit.rs", "(at - self.sequence_offset).rem_euclid", "at.rem_euclid"),
        ),
        (
            "any expectation fits",
            ("permit.rs", "scan.expected.is_none_or(|expected| expected == end)", "true"),
        ),
        (
            "every answer has a log start offset",
            ("produce.rs", "if version >= LOG_START_OFFSET {", "if version >= 0 {"),
        ),
        (
            "no answer before flexible versions has a message",
            ("produce.rs", "        RECORD_ERRORS.. => &NO_MORE_V8,\n", ""),
        ),
        (
            "appends before flexible versions are for Python",
            (
                "produce.rs",
                "let count = read_length(&mut cursor, version)?;\n    if !(1..COUNT_MAX)",
                "let count = read_length(&mut cursor, FLEXIBLE)?;\n    if !(1..COUNT_MAX)",
            ),
        ),
        (
            "an answer with another offset is a success",
            ("permit.rs", "base_offset == sent.at && append_time_ms == -1", "append_time_ms == -1"),
        ),
        (
            "an append time of the broker is no surprise",
            ("permit.rs", "base_offset == sent.at && append_time_ms == -1", "base_offset == sent.at"),
        ),
        (
            "appends of two connections are in flight together",
            ("permit.rs", "each.mode.fenced() && each.connection == it.connection", "each.mode.fenced()"),
        ),
        (
            "a confirmation lasts for ever",
            ("permit.rs", "it.now < self.confirmed_until\n", "true\n"),
        ),
        (
            "any leader is the one that acknowledged",
            ("permit.rs", "            && it.leader_epoch == self.confirmed_epoch;", ";"),
        ),
        (
            "a replaced topic gets what was meant for the former one",
            (
                "arriving.rs",
                ".is(&known.policy) && self",
                ".is(&known.policy) || self",
            ),
        ),
        (
            "appends may be too old",
            ("permit.rs", " && !too_old", ""),
        ),
        ("a wrong CRC is replaced", ("batch.rs", " != crc {", " != crc && false {")),
        *(
            (f"a statement for another {what} counts", ("batch.rs", old, new))
            for what, old, new in (
                (
                    "topic",
                    ".and_then(|rest| rest.strip_prefix(self.topic))",
                    ".and_then(|rest| rest.get(self.topic.len()..))",
                ),
                (
                    "partition",
                    "if !canonical || number != Some(self.partition) {",
                    "if !canonical || number.is_none() {",
                ),
                ("cluster", "is_some_and(|stated| self.cluster_id == Some(stated))", "is_some()"),
            )
        ),
        (
            "a statement may name its partition in any way",
            ("batch.rs", "if !canonical || number != Some(self.partition) {", "if number != Some(self.partition) {"),
        ),
        (
            "appends do not wait for requests that native code relays",
            (
                "connection.rs",
                "self.others_are_open || self.queue.iter().any(|sent| sent.api_key != PRODUCE)",
                "self.others_are_open",
            ),
        ),
        (
            "appends do not wait for requests that Python keeps",
            ("connection.rs", "self.others_are_open || self.queue", "self.queue"),
        ),
        (
            "a header may occur twice",
            ("batch.rs", "if std::mem::replace(&mut observed[name as usize], true) {", "if false {"),
        ),
        (
            "a retry is appended again",
            ("permit.rs", "if fenced_next.is_some_and(|next| next != scan.base_sequence) {", "if false {"),
        ),
        (
            "memory is not released",
            ("appends.rs", "        self.release(py, checked.frame.len() - LENGTH_BYTES)?;\n", ""),
        ),
        ("a permit is used after it was taken back", _ADMITS_LIVE, _LIVE),
        (
            "an answer is taken for that of another append",
            ("permit.rs", "first.id == id && self.is_expected", "self.is_expected"),
        ),
        (
            "older batches are forgotten",
            (
                "permit.rs",
                "if self.remembered.len() + self.in_flight.len() >= self.remembered_max",
                "if false && self.remembered.len() + self.in_flight.len() >= self.remembered_max",
            ),
        ),
        (
            "what was in flight is not counted",
            (
                "permit.rs",
                "self.in_flight.back().map_or(self.log_end, |last| last.at + i64::from(last.count))",
                "self.log_end",
            ),
        ),
        (
            "what Python reported is remembered after a change",
            (
                "process_state.rs",
                "now < self.until && self.changes == CHANGES.load(Ordering::Relaxed)",
                "now < self.until",
            ),
        ),
        (
            "virtual configs are fresh for ever",
            ("process_state.rs", "now < self.until && self.changes", "self.changes"),
        ),
        (
            "a policy is remembered after a change",
            ("request_template.rs", "self.hold_as_of.load(Ordering::Relaxed) == number", "number > 0"),
            ("arriving.rs", "if remembered && !self.settings.verifies() {", "if remembered {"),
        ),
        (
            "a leader epoch is remembered after a change",
            ("arriving.rs", "if queried == number && !self.settings.verifies() {", "if queried > 0 {"),
        ),
        (
            "a relayed request is not looked at after its beginning",
            ("passing.rs", "self.until_probe = until_probe.extract()?;", "self.until_probe = usize::MAX;"),
        ),
        (
            "an error of a watch is forgotten",
            ("passing.rs", "watch.until_probe, watch.error)", "watch.until_probe, None)"),
        ),
        (
            "the bytes before the next probe are miscounted",
            ("passing.rs", "watch.until_probe -= byte_count;", "watch.until_probe -= byte_count.min(1);"),
        ),
        (
            "a null row is an empty one",
            ("encoding.rs", "if *valid.get(index)? == 0 =>", "if *valid.get(index)? > 1 =>"),
        ),
        (
            "a time is not counted as a header",
            ("encoding.rs", "usize::from(time.is_some())", "0 * usize::from(time.is_some())"),
        ),
        (
            "an offset delta takes one byte",
            ("encoding.rs", "2 + delta_bytes.len() + body.len()", "3 + body.len()"),
        ),
        (
            "the end of a key does not count for its partition",
            ("encoding.rs", "    if !rest.is_empty() {", "    if rest.len() > 3 {"),
        ),
        (
            "the end of a row does not count for its hash",
            ("encoding.rs", "mixed(h ^ word_of(rest))", "mixed(h ^ word_of(&rest[..0]))"),
        ),
        (
            "the CRC of a batch leaves its attributes out",
            ("encoding.rs", "crc32c([batch.get(CHECKED_AT..)?])", "crc32c([batch.get(CHECKED_AT + 2..)?])"),
        ),
    ]
    for edits in [tuple(edits_of)]
]
