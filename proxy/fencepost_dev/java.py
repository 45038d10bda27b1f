"""Finding a Java that is new enough for Kafka 4."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fencepost_dev.errors import JavaError

#: Kafka 4 brokers and Spark 4 both need it.
JAVA_VERSION_MIN = 17
VERSION_TIMEOUT_SECONDS = 30

#: Fast start, lower peak speed.
QUICK_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")

_HELP = f"install a JDK {JAVA_VERSION_MIN} or newer, and put it on PATH or set JAVA_HOME"


@dataclass(frozen=True, slots=True)
class Jdk:
    java: Path
    #: Major version: 17, 21, …
    version: int

    @property
    def javac(self) -> Path:
        """The compiler next to `java`. Raises `JavaError` if only a runtime is installed."""
        compiler = self.java.with_name("javac")
        if not compiler.exists():
            raise JavaError(f"{self.java} is a Java runtime without the compiler javac; {_HELP}")
        return compiler


def find_jdk() -> Jdk:
    """The Java of JAVA_HOME if set, else the one on PATH. Raises `JavaError`."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home, "bin", "java")
        if not java.exists():
            raise JavaError(f"JAVA_HOME={home} contains no bin/java (correct or unset it)")
        return _checked(java)
    found = shutil.which("java")
    if found is None:
        raise JavaError(f"no Java found; {_HELP}")
    return _checked(Path(found).resolve())


@functools.cache
def _checked(java: Path) -> Jdk:
    try:
        printed = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_SECONDS, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{java} does not run ({error}); {_HELP}") from error
    match = re.search(r'version "(?:1\.)?(\d+)', printed)
    if match is None:
        raise JavaError(f"{java} -version prints no version; {_HELP}")
    version = int(match[1])
    if version < JAVA_VERSION_MIN:
        raise JavaError(f"{java} is Java {version}, too old; {_HELP}")
    return Jdk(java, version)


def logging_flags(level: str, *, to_stderr: bool) -> list[str]:
    """JVM flags for Kafka's logging: lowest level (INFO, WARN, …) and stream."""
    here = Path(__file__).parent
    stream = "err" if to_stderr else "out"
    return [
        f"-Dlog4j2.configurationFile={here / 'log4j2.properties'}",
        f"-Dlog4j.configuration=file:{here / 'log4j.properties'}",
        f"-Dfencepost.log.level={level}",
        # log4j 2 and reload4j name the streams differently.
        f"-Dfencepost.log.target=SYSTEM_{stream.upper()}",
        f"-Dfencepost.log.stream=System.{stream}",
    ]
