"""`make release`: what is exported, which parts are left out, the notes, and the workflow that would publish.

`tests/integration/test_release.py` makes a release.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from release import __main__ as command
from release import artefacts, quickstart, source
from release.artefacts import Builder, CannotBuild, crates
from release.source import ReleaseError, Source, export, release_notes

ROOT = Path(__file__).parents[2]
VERSION = source.version_of(ROOT)
CHANGELOG = "# Changelog\n\n## Unreleased\n\nnext\n\n## [1.2.3] - 2026-12-01\n\nnew\n\n### A\n\n## 1.2.2\n\n"


def of(tree: Path, tag: str | None = f"v{VERSION}") -> Source:
    return Source(tag, "0" * 40, 1, tree)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Version 1.2.3, tagged v1.2.3 and v9."""
    root = tmp_path / "repository"
    (root / "native").mkdir(parents=True)
    (root / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (root / "native" / "Cargo.toml").write_text('[package]\nversion = "1.2.3"\n')
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    git = ("git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@example.org")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-qm", "one"), ("tag", "v1.2.3"), ("tag", "v9")):
        subprocess.run([*git, *arguments], check=True)
    return root


def test_only_committed_files_are_exported(repository: Path, tmp_path: Path) -> None:
    (repository / "new.py").write_text("")
    (repository / "CHANGELOG.md").write_text("changed")
    (to := tmp_path / "to").mkdir()
    (to / "of an earlier run").write_text("")
    exported = export("v1.2.3", to, repository)
    assert {each.name for each in to.iterdir()} == {"CHANGELOG.md", "native", "pyproject.toml"}
    assert (exported.version, exported.commit) == ("1.2.3", source.git("rev-parse", "HEAD", root=repository))
    assert release_notes(exported) == "new\n\n### A"


@pytest.mark.parametrize(
    ("tag", "message"),
    [("v1", "there is no tag v1 .make it: git tag -a v1"), ("v9", "tag v9 is on version 1.2.3 .* is v1.2.3")],
)
def test_tag_must_exist_and_name_the_version(repository: Path, tmp_path: Path, tag: str, message: str) -> None:
    with pytest.raises(ReleaseError, match=message):
        export(tag, tmp_path / "to", repository)


def test_native_module_must_have_the_version(repository: Path) -> None:
    (repository / "native" / "Cargo.toml").write_text('[package]\nversion = "1.2.2"\n')
    with pytest.raises(ReleaseError, match=r"pyproject.toml has version 1.2.3, native/Cargo.toml 1.2.2"):
        source.version_of(repository)


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        ("## Unreleased\n\nnext\n", "CHANGELOG.md has no section '## 1.2.3'"),
        ("## 1.2.3 - 2026-12-01\n\n## 1.2.2\n\nold\n", "the section of 1.2.3 in CHANGELOG.md is empty"),
        ("## 1.2.30\n\nother\n", "CHANGELOG.md has no section '## 1.2.3'"),
    ],
)
def test_release_needs_its_section_of_the_changelog(repository: Path, changelog: str, message: str) -> None:
    (repository / "CHANGELOG.md").write_text(changelog)
    with pytest.raises(ReleaseError, match=re.escape(message)):
        release_notes(of(repository, "v1.2.3"))


def test_trial_has_the_changes_of_the_next_release() -> None:
    assert release_notes(of(ROOT, None)).startswith("No version is released yet.")


def test_wheel_for_another_machine_needs_its_rust_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "rustc"
    compiler.write_text(f'#!/bin/sh\necho "{tmp_path}/$4"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("RUSTC", str(compiler))
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(CannotBuild, match=r"run `rustup target add aarch64-unknown-linux-gnu`.* --without aarch64"):
        object.__new__(Builder).native_wheel("aarch64")
    (library := tmp_path / "aarch64-unknown-linux-gnu").mkdir()
    (library / "libstd-0123.rlib").write_text("")
    assert artefacts._has_rust_for("aarch64-unknown-linux-gnu")


def test_incomplete_release_has_another_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fake:
        def __init__(self, source: Source, tools: Path, dist: Path) -> None:
            self._dist = dist
            dist.mkdir(parents=True, exist_ok=True)

        def _made(self, name: str) -> Path:
            (self._dist / name).write_text(name)
            return self._dist / name

        def sdist(self) -> Path:
            return self._made("sdist.tar.gz")

        def pure_wheel(self) -> Path:
            return self._made("f-1-py3-none-any.whl")

        def native_wheel(self, machine: str) -> Path:
            if machine == "aarch64":
                raise CannotBuild("wheel for aarch64: left out")
            return self._made(f"f-1-cp311-abi3-manylinux_2_17_{machine}.whl")

        def sbom(self) -> Path:
            return self._made("f.cdx.json")

        def check_with_twine(self, files: list[Path]) -> None:
            assert len(files) in (2, 3)

    monkeypatch.setattr(command, "Builder", Fake)
    arguments = ["release", "--to", str(tmp_path), "--without", "quickstart", "--without", "images"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == 1
    printed = capsys.readouterr().out
    assert "A TRIAL, NOT A RELEASE" in printed
    assert "wheel for aarch64: left out\n" in printed
    assert "INCOMPLETE: " in printed
    (dist,) = tmp_path.glob("*/dist")
    assert "A trial from commit" in (dist / "RELEASE-NOTES.md").read_text()
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=True)

    monkeypatch.setattr(sys, "argv", [*arguments, "--without", "aarch64"])
    assert command.main() == 0
    printed = capsys.readouterr().out
    assert "\ncomplete: " in printed
    assert "the same bytes as in the run before: 5 files" in printed


def test_run_with_other_bytes_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    command.compare({"a": "1", "b": "2", "old": "3"}, {"a": "1", "b": "9", "new": "4"})
    assert capsys.readouterr().out == "other bytes than in the run before: b\n"


def test_images_need_an_engine_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, status in (("docker", 1), ("podman", 0)):
        with pytest.raises(CannotBuild, match="neither docker nor podman answers"):
            artefacts.engine()
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    assert artefacts.engine() == "podman"


def test_bill_of_materials_has_every_crate() -> None:
    locked = (ROOT / "native" / "Cargo.lock").read_text().count("\nsource = ")
    found = crates(ROOT)
    assert len(found) == locked > 10
    assert all(re.fullmatch(r"pkg:cargo/[\w-]+@[\d.]+(%2B[\w-]+)?", each["purl"]) for each in found)


def test_foreign_wheels_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    names = (
        "f-1.tar.gz",
        "f-1-py3-none-any.whl",
        *(f"f-1-cp311-abi3-manylinux_2_17_{m}.whl" for m in artefacts.MACHINES),
    )
    assert [artefacts.runs_here(Path(name)) for name in names] == [True, True, True, False]


def test_quickstart_has_steps_with_output() -> None:
    steps = quickstart.blocks((ROOT / "docs" / "quickstart.md").read_text())
    assert [shown.partition("\n")[0] for _, shown in steps] == [
        "appended at 0",
        "expected 1, but the log ends at 2",
        "OFFSET_MISMATCH topic=orders partition=0 expected=1 actual=2",
    ]


def test_environment_leads_to_no_other_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "FENCEPOST_NATIVE", "RUSTFLAGS"):
        monkeypatch.setenv(name, "x")
    assert artefacts.clean_environment().items() <= os.environ.items()
    assert not {"PYTHONPATH", "FENCEPOST_NATIVE", "RUSTFLAGS"} & artefacts.clean_environment().keys()


def test_workflow_publishes_what_make_release_builds_from_a_tag() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert text.startswith("# Not used yet")
    workflow: dict[Any, Any] = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` so
    assert workflow["permissions"] == {"contents": "read"}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert {"run": 'make release TAG="$GITHUB_REF_NAME"'} in build["steps"]
    assert set(re.search(r"for image in ([\w -]+);", text)[1].split()) == set(artefacts.IMAGES)  # type: ignore[index]
    # By an identity of the workflow, not a stored password.
    assert publish["permissions"]["id-token"] == "write"
    assert "password:" not in text
    assert not {"id-token"} & build["permissions"].keys()
