"""The test suites: source, version, and how to run each suite at a bootstrap address.

Sources come from package registries through their usual clients, pinned by hash, and are cached in build/foreign.
Sources that no registry has come from a directory of checkouts (`--sources`). A suite is skipped if both lack it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fencepost_dev.jars import DEFAULT_VERSION

GIVEN = Path(__file__).parent / "given"
#: Limit for one test, in its process or in pytest.
TEST_SECONDS = 180
#: Limit for one whole run of pytest.
RUN_SECONDS = 1500
BUILD_SECONDS = 1200
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

Outcomes = dict[str, str]


class Missing(Exception):
    """The suite cannot run here; the message says what it needs."""


@dataclass(frozen=True)
class Run:
    """One setup: `bootstrap`, and a directory for the output of its tests."""

    bootstrap: str
    directory: Path


@dataclass(frozen=True)
class Suite:
    """`get` – returns its sources, built below the first directory; the second directory has checkouts, if given.

    `run` – returns the outcome of these tests, or of all tests of the suite. `brokers`, `properties` – of Kafka.
    """

    name: str
    version: str
    what: str
    get: Callable[[Path, Path | None], Path]
    run: Callable[[Path, Run, Sequence[str] | None], Outcomes]
    properties: Mapping[str, str] = field(default_factory=dict)
    brokers: int = 1


def command(*words: object, cwd: Path, log: Path, seconds: float = BUILD_SECONDS, **environment: str) -> int | None:
    """Return the exit code, or None after the time limit. Output goes to the log."""
    with log.open("a") as out:
        process = subprocess.Popen(
            [str(each) for each in words],
            cwd=cwd,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def build(*words: object, cwd: Path, log: Path, **environment: str) -> None:
    if command(*words, cwd=cwd, log=log, **environment) != 0:
        raise Missing(f"{' '.join(map(str, words))} failed: {log}")


def need(*tools: str) -> None:
    if lacking := [each for each in tools if shutil.which(each) is None]:
        raise Missing(f"needs {', '.join(lacking)}")


def unpacked(archive: Path, sha256: str, into: Path) -> None:
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise SystemExit(f"{archive.name}: SHA-256 {found}, expected {sha256}")
    with tarfile.open(archive) as opened:
        opened.extractall(into, filter="data")


def checkout(sources: Path | None, name: str, needed: str, into: Path) -> None:
    """Copy the tests from a checkout; the library's packages lack them."""
    if sources is None or not (sources / name / needed).exists():
        raise Missing(f"no package has its tests: needs a checkout of it as DIR/{name} and SOURCES=DIR")
    shutil.copytree(sources / name / "tests", into / "tests", dirs_exist_ok=True)


# --- pytest -----------------------------------------------------------------------------------------------------------


def pytest(root: Path, run: Run, tests: Iterable[str], arguments: Sequence[str] = (), **environment: str) -> Outcomes:
    report = run.directory / "report.xml"
    report.unlink(missing_ok=True)
    command(
        *(sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", root, "-p", "no:cacheprovider"),
        *("--timeout", TEST_SECONDS, "--junitxml", report, "-o", "junit_family=xunit1", *arguments, *tests),
        cwd=root,
        log=run.directory / "log",
        seconds=RUN_SECONDS,
        PYTHONPATH=str(root),
        KAFKA=run.bootstrap,
        KAFKA_VERSION=DEFAULT_VERSION,
        **environment,
    )
    if not report.exists():
        return {}
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        file = case.get("file", "")
        of_class = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
        name = "::".join(part for part in (file, of_class, case.get("name", "")) if part)
        kinds = {each.tag for each in case}
        outcomes[name] = FAILED if kinds & {"failure", "error"} else SKIPPED if "skipped" in kinds else PASSED
    return outcomes


def get_kafka_python(into: Path, sources: Path | None) -> Path:
    version = KAFKA_PYTHON.version
    root = into / f"kafka_python-{version}"
    if not root.exists():
        pip = (sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps")
        build(*pip, "--no-binary", "kafka-python", f"kafka-python=={version}", cwd=into, log=into / "kafka-python.log")
        sha256 = "4ccda3616b9aa5c353d74a97f2770d6cd1b950890d77ab0e8890e09a48eeed65"
        unpacked(into / f"kafka_python-{version}.tar.gz", sha256, into)
    # The sdist lacks both files. Without the first, Python would import its standard package of this name.
    (root / "test" / "__init__.py").touch()
    shutil.copy(GIVEN / "kafka_python_service.py", root / "test" / "service.py")
    # The test assumes broker id 0; our broker ids start at 1.
    admin = root / "test" / "integration" / "test_admin_integration.py"
    admin.write_text(admin.read_text().replace("[[0], [0]]", "[[1], [1]]"))
    return root


def run_kafka_python(root: Path, run: Run, only: Sequence[str] | None) -> Outcomes:
    files = [f"test/integration/test_{each}_integration.py" for each in ("admin", "consumer", "producer")]
    return pytest(root, run, only or files, KAFKA_URI=f"kafka://{run.bootstrap}", KAFKA_ROOT=str(root))


def get_aiokafka(into: Path, sources: Path | None) -> Path:
    root = into / f"aiokafka-{AIOKAFKA.version}"
    checkout(sources, "aiokafka", "tests/test_consumer.py", root)
    shutil.copy(GIVEN / "aiokafka_conftest.py", root / "tests" / "conftest.py")
    return root


def run_aiokafka(root: Path, run: Run, only: Sequence[str] | None) -> Outcomes:
    files = ("admin", "client", "consumer", "coordinator", "pep492", "producer", "transactional_consumer",
             "transactional_producer")  # fmt: skip
    tests = only or [f"tests/test_{each}.py" for each in files]
    return pytest(root, run, tests, ("-k", "(ntegration or Transactional or Admin or Client) and not ssl"))


def get_confluent(into: Path, sources: Path | None) -> Path:
    root = into / f"confluent-kafka-python-{CONFLUENT.version}"
    checkout(sources, "confluent-kafka-python", "tests/integration/producer/test_transactions.py", root)
    shutil.copy(GIVEN / "confluent_conftest.py", root / "tests" / "integration" / "conftest.py")
    (root / "tests" / "conftest.py").unlink(missing_ok=True)
    return root


def run_confluent(root: Path, run: Run, only: Sequence[str] | None) -> Outcomes:
    share_consumers = [f"share_consumer/test_share_consumer{part}.py" for part in ("", "_ack", "_close", "_commit")]
    files = ("producer/test_transactions.py", *share_consumers)
    return pytest(root, run, only or [f"tests/integration/{file}" for file in files])


# --- one process for each test ----------------------------------------------------------------------------------------


def get_franz_go(into: Path, sources: Path | None) -> Path:
    need("go")
    root = into / f"franz-go-{FRANZ_GO.version}"
    log = into / "franz-go.log"
    if not (root / "kgo.test").exists():
        module = f"github.com/twmb/franz-go@v{FRANZ_GO.version}"
        (into / "go.mod").write_text("module foreign\n")
        done = subprocess.run(
            ["go", "mod", "download", "-json", module], cwd=into, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise Missing(f"go mod download {module}: {done.stderr or done.stdout}")
        found = json.loads(done.stdout)
        if found["Sum"] != "h1:1wTvyLTOxS0oJh5ro/DVt2JHVdx7/kGNtmtFhbcr0O0=":
            raise SystemExit(f"{module}: sum {found['Sum']} is not the expected one")
        # The module cache is shared and read-only.
        shutil.copytree(found["Dir"], root, copy_function=shutil.copyfile, dirs_exist_ok=True)
        for each in (root, *root.rglob("*")):
            each.chmod(0o755 if each.is_dir() else 0o644)
        build("go", "test", "-c", "-o", root / "kgo.test", "./pkg/kgo", cwd=root, log=log, GOFLAGS="-mod=mod")
    return root


FRANZ_GO_TESTS = (  # noqa: SIM905
    "TestAddRemovePartitions TestClient_Produce TestConsumeRegex TestConsumeTopicRetrieval "
    "TestConsumeTopicRetrieval_Many TestDirectPartitionPurge TestGroupETL TestGroupSimple TestIssue325 "
    "TestIssue337 TestIssue434 TestIssue523 TestIssue648 TestIssue769 TestIssue810 TestIssue831 "
    "TestIssue865 TestIssue1034 TestPauseIssue489 TestPauseIssueOct2023 TestPing TestPooling TestTxnEtl "
    "TestUnknownGroupOffsetFetchPinned"
).split()


def run_franz_go(root: Path, run: Run, only: Sequence[str] | None) -> Outcomes:
    outcomes = {}
    settings = {"KGO_SEEDS": run.bootstrap, "KGO_TEST_RF": "1", "KGO_TEST_RECORDS": "20000"}
    for test in only or FRANZ_GO_TESTS:
        log = run.directory / f"{test}.log"
        words = (root / "kgo.test", "-test.v", "-test.run", f"^{test}$")
        code = command(*words, cwd=root / "pkg" / "kgo", log=log, seconds=TEST_SECONDS, **settings)
        skipped = f"--- SKIP: {test}" in log.read_text(errors="replace")
        outcomes[test] = FAILED if code != 0 else SKIPPED if skipped else PASSED
    return outcomes


LIBRDKAFKA_TESTS = (  # noqa: SIM905
    "0001 0002 0003 0005 0007 0008 0011 0012 0013 0014 0015 0017 0018 0019 0021 0022 0026 0028 0029 0030 "
    "0031 0033 0034 0036 0039 0041 0042 0044 0045 0046 0048 0050 0051 0054 0056 0057 0059 0060 0061 0063 "
    "0065 0067 0069 0070 0073 0074 0082 0083 0084 0085 0086 0089 0090 0092 0093 0094 0099 0100 0102 "
    "0107 0110 0111 0112 0113 0114 0118 0120 0122 0125 0127 0129 0130 0132 0137 0140"
).split()
#: Run the test of admin calls call by call, because the first failing call would end the whole test.
LIBRDKAFKA_ADMIN_CALLS = (  # noqa: SIM905
    "CreateTopics DeleteTopics CreatePartitions DescribeConfigs AlterConfigs IncrementalAlterConfigs ListOffsets "
    "CreateAcls DescribeAcls DeleteAcls DeleteRecords DeleteGroups DescribeTopics DescribeCluster ListConsumerGroups "
    "DescribeConsumerGroups DeleteConsumerGroupOffsets AlterConsumerGroupOffsets ListConsumerGroupOffsets "
    "UserScramCredentials"
).split()
LIBRDKAFKA_TESTS += [f"0081/do_test_{each}" for each in LIBRDKAFKA_ADMIN_CALLS]


#: Without 0176, which fails in its own mock cluster, and 0184, which takes longer than `TEST_SECONDS`.
SHARE_TESTS = "0170 0171 0172 0173 0174 0175 0177 0178 0179 0180 0181 0185 0190".split()  # noqa: SIM905


def get_librdkafka(into: Path, sources: Path | None) -> Path:
    """Uses the copy that Confluent's JavaScript client bundles."""
    need("npm", "gcc", "g++", "make")
    package = "1.10.1"
    root = into / f"librdkafka-{LIBRDKAFKA.version}"
    tests = root / "package/deps/librdkafka/tests"
    log = into / "librdkafka.log"
    if not (tests / "test-runner").exists():
        build("npm", "pack", "--silent", f"@confluentinc/kafka-javascript@{package}", cwd=into, log=log)
        archive = into / f"confluentinc-kafka-javascript-{package}.tgz"
        unpacked(archive, "ada7d703bb1d3237e2292bfabf438d663b6160c9f1ac2a2406b5dc4257c81b66", root)
        lacking = [f"--disable-{each}" for each in ("gssapi", "curl", "zstd", "ssl")]
        build("./configure", *lacking, cwd=tests.parent, log=log)
        jobs = f"-j{os.cpu_count()}"
        build("make", jobs, "libs", cwd=tests.parent, log=log)
        build("make", jobs, "build", cwd=tests, log=log)
    return tests


def run_librdkafka(
    root: Path, run: Run, only: Sequence[str] | None, tests: Sequence[str] = LIBRDKAFKA_TESTS
) -> Outcomes:
    outcomes = {}
    conf = run.directory / "test.conf"
    conf.write_text(f"bootstrap.servers={run.bootstrap}\ntest.topic.random=true\n")
    libraries = os.pathsep.join(str(root.parent / each) for each in ("src", "src-cpp"))
    for test in only or tests:
        number, _, subtest = test.partition("/")
        log = run.directory / f"{number}{subtest}.log"
        log.unlink(missing_ok=True)
        code = command(
            *(root / "test-runner", "-p1", "-Q", "-E"),
            cwd=root,
            log=log,
            seconds=TEST_SECONDS,
            LD_LIBRARY_PATH=libraries,
            RDKAFKA_TEST_CONF=str(conf),
            TESTS=number,
            TEST_KAFKA_VERSION=DEFAULT_VERSION,
            **({"SUBTESTS": subtest} if subtest else {}),
        )
        skipped = re.search(r"\| [^|]*\| +SKIPPED ", log.read_text(errors="replace"))
        outcomes[test] = FAILED if code != 0 else SKIPPED if skipped else PASSED
    return outcomes


# --- the table --------------------------------------------------------------------------------------------------------

#: Some tests create ACLs; without any, every user may do everything.
AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}
LIBRDKAFKA = Suite("librdkafka", "2.15.1", "producers, consumers, groups, admin, transactions",
                   get_librdkafka, run_librdkafka, {"num.partitions": "4", **AUTHORIZER})  # fmt: skip
LIBRDKAFKA_3 = Suite("librdkafka-3", "2.15.1", "transactions, three brokers", get_librdkafka,
                     partial(run_librdkafka, tests=("0103",)), LIBRDKAFKA.properties, brokers=3)  # fmt: skip
LIBRDKAFKA_SHARE = Suite("librdkafka-share", "2.15.1", "share consumers", get_librdkafka,
                         partial(run_librdkafka, tests=SHARE_TESTS), LIBRDKAFKA.properties)  # fmt: skip
FRANZ_GO = Suite("franz-go", "1.20.4", "kgo tests with a broker", get_franz_go, run_franz_go)
CONFLUENT = Suite("confluent-kafka-python", "2.15.0", "tests/integration: transactions, share consumers",
                  get_confluent, run_confluent,
                  {f"group.share.{least}record.lock.duration.ms": "1000" for least in ("", "min.")})  # fmt: skip
KAFKA_PYTHON = Suite("kafka-python", "3.0.12", "test/integration: admin, consumer, producer",
                     get_kafka_python, run_kafka_python,
                     {"num.partitions": "4", "group.min.session.timeout.ms": "1000", **AUTHORIZER})  # fmt: skip
AIOKAFKA = Suite("aiokafka", "0.14.0", "integration tests without TLS, SASL", get_aiokafka, run_aiokafka,
                 {"num.partitions": "2"})  # fmt: skip
SUITES = (LIBRDKAFKA, LIBRDKAFKA_3, LIBRDKAFKA_SHARE, FRANZ_GO, CONFLUENT, KAFKA_PYTHON, AIOKAFKA)
