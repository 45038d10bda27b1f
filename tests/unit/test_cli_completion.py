"""`fencepost completion`, run by the shells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fencepost_proxy.cli import main

#: What bash does at Tab after these words.
_PRESS_TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
handler=$(complete -p fencepost | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$handler" fencepost "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("completion")
    written = {}
    for shell in ("bash", "zsh", "fish"):
        script = subprocess.run(
            [sys.executable, "-m", "fencepost_proxy.cli.main", "completion", shell],
            capture_output=True,
            text=True,
            check=True,
        )
        written[shell] = directory / shell
        written[shell].write_text(script.stdout, "utf-8")
    return written


def tab(script: Path, *words: str, where: Path) -> set[str]:
    """What bash suggests after the last of `words`."""
    done = subprocess.run(
        ["bash", "--norc", "-c", _PRESS_TAB, "bash", str(script), *words],
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return {line.rstrip() for line in done.stdout.splitlines()}


def test_bash_completes_commands_options_values_and_files(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "fencepost.toml").touch()
    bash = scripts["bash"]

    assert tab(bash, "fencepost", "", where=tmp_path) >= set(main._COMMANDS)
    assert tab(bash, "fencepost", "pro", where=tmp_path) == {"proxy"}
    assert tab(bash, "fencepost", "proxy", "--log-f", where=tmp_path) == {"--log-format"}
    assert tab(bash, "fencepost", "proxy", "--log-format", "", where=tmp_path) == {"console", "json"}
    assert tab(bash, "fencepost", "proxy", "--config", "fen", where=tmp_path) == {"fencepost.toml"}
    assert tab(bash, "fencepost", "completion", "", where=tmp_path) >= {"bash", "zsh", "fish"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_scripts_parse(shell: str, scripts: dict[str, Path]) -> None:
    text = scripts[shell].read_text("utf-8")
    assert all(command in text for command in main._COMMANDS)
    if shutil.which(shell) is not None:
        done = subprocess.run([shell, "-n", scripts[shell]], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["completion", "csh"])
    assert "bash" in capsys.readouterr().err
