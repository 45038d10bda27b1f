"""The recipes with each client library, while their processes are stopped and killed, and a proxy is killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition

from fencepost import LogRecord, Record
from fencepost.kafka_python import LogReader, LogWriter
from fencepost.recipes import Leader, by_key
from fencepost_dev.cluster import KafkaCluster
from tests.kit.lines import LineProcess
from tests.kit.waiting import until
from tests.support import clients
from tests.support.clients import LIBRARIES
from tests.support.docs import ROOT, blocks
from tests.support.fixtures import proxy_fixture
from tests.support.linearizable import Call, violations
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.recipe_worker import LOAD_PARTITIONS, LOAD_UNITS, loaded
from tests.support.senders import free_proxy_port

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

CLAIM = ("fencepost-recipe", b"leader/1 claim")


proxy = proxy_fixture(config=CHECKED_BY_NAME, port=free_proxy_port)


@pytest.fixture
def topic(proxy: ProxyProcess, unique_topic: Callable[..., str]) -> str:
    return clients.create_topic(proxy.bootstrap, unique_topic("required"))


class Worker(LineProcess):
    """A process of `tests.support.recipe_worker`. `outcomes` – what it printed."""

    def __init__(self, recipe: str, library: str, proxy: ProxyProcess, topic: str, name: str) -> None:
        command = [sys.executable, "-m", "tests.support.recipe_worker", recipe, library, proxy.bootstrap, topic, name]
        self.name = name
        self.outcomes: list[dict[str, Any]] = []
        self.log = proxy.directory / f"{topic}-{name}.log"
        super().__init__(command, self._printed, log=self.log)

    def _printed(self, line: str | None) -> None:
        if line is not None:
            self.outcomes.append(json.loads(line))

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


class Crew:
    """Workers of one recipe, one for each library in turn, which `disturb` stops, kills and replaces."""

    def __init__(
        self,
        recipe: str,
        proxy: ProxyProcess,
        topic: str,
        kafka: KafkaCluster,
        libraries: Sequence[str] = LIBRARIES,
    ) -> None:
        self.rng = random.Random(seed := random.randrange(1 << 32))
        print(f"seed {seed}")
        self._recipe, self._proxy, self._topic, self._kafka = recipe, proxy, topic, kafka
        self._libraries = cycle(libraries)
        self.workers: list[Worker] = []
        self.ended: list[Worker] = []
        for _ in libraries:
            self._start()

    def _start(self) -> None:
        library = next(self._libraries)
        name = f"{library}-{len(self.workers) + len(self.ended)}"
        self.workers.append(Worker(self._recipe, library, self._proxy, self._topic, name))

    def outcomes(self) -> list[dict[str, Any]]:
        return [{"worker": each.name, **o} for each in (*self.ended, *self.workers) for o in list(each.outcomes)]

    def wait_for(self, enough: Callable[[], bool], seconds: float = 240) -> None:
        """Disturb until there is enough."""
        give_up, kills = time.monotonic() + seconds, 0
        while not enough():
            assert time.monotonic() < give_up, self.outcomes()[-20:]
            for worker in self.workers:
                assert worker.running, self._end(worker)
            time.sleep(self.rng.uniform(0.1, 0.5))
            self._disturb(kills)
            kills += 1

    def _disturb(self, number: int) -> None:
        worker = self.rng.choice(self.workers)
        (broker,) = self._kafka.node_ids
        if number % 40 == 39:
            self._kafka.kill(broker)
            self._kafka.restart(broker)
        elif number % 10 == 8:
            self._kafka.pause(broker)
            time.sleep(self.rng.uniform(0.2, 2.0))
            self._kafka.resume(broker)
        elif number % 10 == 6:
            self._proxy.kill()
            self._proxy.restart()
        elif number % 10 == 3:
            self._end(worker)
            self._start()
        else:
            worker.stop()
            time.sleep(self.rng.uniform(0.2, 1.0))
            worker.resume()

    def _end(self, worker: Worker) -> str:
        self.workers.remove(worker)
        self.ended.append(worker)
        worker.kill()
        return worker.log.read_text()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self.workers):
            self._end(worker)


def _in_log(kafka: KafkaCluster, topic: str) -> list[LogRecord]:
    """Read from Kafka directly."""
    with LogReader([(topic, 0)], bootstrap_servers=kafka.bootstrap) as log:
        return [record for _, record in log]


def test_term_increases_after_all_claims_were_deleted(proxy: ProxyProcess, topic: str) -> None:
    """A consumer group's generation begins at 1 again after Kafka has deleted the idle group."""
    with Leader(LogWriter(topic, 0, bootstrap_servers=proxy.bootstrap), "first") as first:
        term = first.claim()
        end = first.append([Record(b"x")] * 3) + 3
    with KafkaAdminClient(bootstrap_servers=proxy.bootstrap) as admin:
        admin.delete_records({TopicPartition(topic, 0): end})
    with Leader(LogWriter(topic, 0, bootstrap_servers=proxy.bootstrap), "second") as second:
        assert second.claim() == end > term
        assert second.append([Record(b"y")]) == end + 1


@pytest.mark.parametrize("takeovers", [30, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
def test_no_record_of_an_old_leader_follows_a_claim(
    takeovers: int, proxy: ProxyProcess, topic: str, kafka: KafkaCluster
) -> None:
    with Crew("leader", proxy, topic, kafka) as crew:
        crew.wait_for(
            lambda: sum("claimed" in outcome for outcome in crew.outcomes()) >= takeovers, 240 + 4 * takeovers
        )
        outcomes = crew.outcomes()
    terms, appended = _terms(_in_log(kafka, topic))
    deposed = sum(outcome.get("deposed") is not None for outcome in outcomes)
    print(f"{terms} claims, {appended} records, {deposed} leaders deposed")
    assert terms >= takeovers
    assert appended > terms / 2
    assert deposed > takeovers / 4


@pytest.mark.soak
def test_leader_stopped_for_a_minute_appends_nothing_after_it(
    proxy: ProxyProcess, topic: str, kafka: KafkaCluster
) -> None:
    with Crew("leader", proxy, topic, kafka) as crew:

        def leaders() -> list[Worker]:
            return [worker for worker in crew.workers if any("appended" in each for each in worker.outcomes[-1:])]

        until(lambda: len(leaders()) > 0, "a leader")
        leader = (leaders() or crew.workers)[0]
        leader.stop()
        outcomes = len(leader.outcomes)
        time.sleep(60)
        leader.resume()
        until(lambda: len(leader.outcomes) > outcomes + 3, "the stopped process continues")
        terms, appended = _terms(_in_log(kafka, topic))
    print(f"{terms} claims, {appended} records; then the stopped leader: {leader.outcomes[outcomes : outcomes + 3]}")
    assert terms > 3
    assert any("deposed" in each for each in leader.outcomes[outcomes:])


def _terms(log: Sequence[LogRecord]) -> tuple[int, int]:
    """The numbers of claims and of other records, none of which is of an old leader."""
    term, terms, appended, from_old = -1, 0, 0, []
    for record in log:
        if CLAIM in record.headers:
            term, terms = record.offset, terms + 1
        else:
            appended += 1
            assert record.value is not None
            if int(record.value) != term:
                from_old.append((record.offset, record.value, term))
    assert not from_old
    return terms, appended


class _State:
    def __init__(self) -> None:
        self.applied: list[LogRecord] = []

    def apply(self, record: LogRecord) -> None:
        self.applied.append(record)


class _Source:
    def read(self, position: bytes | None) -> Iterator[tuple[list[Record], bytes]]:
        yield [Record(b"a row", b"its key")], b"1"


PAGES = sorted(page for page in (ROOT / "docs" / "recipes").glob("*.md") if page.stem != "index")
PRINTED: dict[str, list[str]] = {
    "leader": [],
    "loader": [],
    "lock": ["True 0"],
    "queue": [],
    "table": [
        "limit Entry(value=b'10', version=0)",
        "limit Entry(value=b'20', version=1)",
        "Entry(value=b'20', version=1)",
        "limit None",
    ],
    "registry": ['1 b\'{"type": "string"}\'', "None", "1"],
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_code_runs(  # noqa: PLR0917 - fixtures
    page: Path,
    proxy: ProxyProcess,
    unique_topic: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    [code] = [block.text for block in blocks(page) if block.language == "python"]
    assert len(code.splitlines()) <= 10
    for name in sorted(set(re.findall(r'Log(?:Writer|Reader)\(\[?\(?"([\w-]+)"', code))):
        code = code.replace(f'"{name}"', f'"{clients.create_topic(proxy.bootstrap, unique_topic("required"))}"')
    exec(
        compile(code.replace("localhost:19092", proxy.bootstrap), str(page), "exec"),
        {"state": _State(), "source": _Source()},
    )
    assert capsys.readouterr().out.splitlines() == PRINTED[page.stem]


@pytest.mark.parametrize("libraries", [LIBRARIES[:2], LIBRARIES[1:]], ids="+".join)
def test_load_has_each_row_once_while_its_loaders_are_killed(
    libraries: Sequence[str], proxy: ProxyProcess, unique_topic: Callable[..., str], kafka: KafkaCluster
) -> None:
    """Two loaders at once, each of which continues where the log ends."""
    topic = clients.create_topic(proxy.bootstrap, unique_topic("required"), partitions=LOAD_PARTITIONS)
    with Crew("loader", proxy, topic, kafka, libraries) as crew:
        crew.wait_for(lambda: any("complete" in outcome for outcome in crew.outcomes()))
        outcomes = crew.outcomes()
    found: list[list[bytes | None]] = [[] for _ in range(LOAD_PARTITIONS)]
    with LogReader([(topic, each) for each in range(LOAD_PARTITIONS)], bootstrap_servers=kafka.bootstrap) as log:
        for (_, partition), record in log:
            found[partition].append(record.value)
    expected: list[list[bytes | None]] = [[] for _ in range(LOAD_PARTITIONS)]
    for unit in range(1, LOAD_UNITS + 1):
        for row in loaded(unit):
            expected[by_key(row, unit, LOAD_PARTITIONS)].append(row.value)
    print(f"{len(crew.ended)} loaders killed, {sum('taken_over' in each for each in outcomes)} taken over")
    assert found == expected


def test_load_command_can_be_killed_anywhere(
    proxy: ProxyProcess, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = clients.create_topic(proxy.bootstrap, unique_topic("required"), partitions=2)
    files = [tmp_path / f"part-{each}.jsonl" for each in (2, 10)]
    for file in files:
        file.write_text("".join(f'{{"k": {n % 7}, "of": "{file.name} {n // 2}"}}\n' for n in range(20_000)))
    command = [sys.executable, "-m", "fencepost_proxy", "load", topic, *map(str, files), "--name", "a load"]
    command += ["--bootstrap", proxy.bootstrap, "--key", "k", "--verify"]
    for seconds in (1.5, 2.0, 2.5):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(seconds)
            process.kill()
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, (done.stdout, done.stderr)
        assert "40,000 lines found in order, 0 not; 0 other records" in done.stdout
    assert "continues after byte" in done.stderr
    with files[0].open("a") as out:
        out.write('{"k": 1}\n')
    done = subprocess.run([*command, "--timeout", "5"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(rf"first difference: {topic}-\d offset \d+", done.stdout)


def test_registry_gives_no_number_twice(proxy: ProxyProcess, topic: str, kafka: KafkaCluster) -> None:
    with Crew("registry", proxy, topic, kafka) as crew:
        crew.wait_for(lambda: len(_given(crew)) >= 200 and len({each["library"] for each in _given(crew)}) == 3)
        given = _given(crew)
    records = _in_log(kafka, topic)
    assert [dict(each.headers)["fencepost-number"] for each in records] == [
        b"%d" % (number + 1) for number in range(len(records))
    ]
    entries = {(each.key or b"").decode(): (at + 1, (each.value or b"").decode()) for at, each in enumerate(records)}
    assert len(entries) == len(records) > 20
    assert [each for each in given if entries[each["name"]] != (each["number"], each["value"])] == []


def _given(crew: Crew) -> list[dict[str, Any]]:
    return [{**each, "library": each["worker"].rpartition("-")[0]} for each in crew.outcomes() if "name" in each]


def test_tokens_of_a_lock_are_never_given_twice(proxy: ProxyProcess, topic: str, kafka: KafkaCluster) -> None:
    with Crew("lock", proxy, topic, kafka) as crew:
        crew.wait_for(lambda: len(_tokens(crew)) > 8 and len({worker for worker, _ in _tokens(crew)}) > 1)
        outcomes = [outcome for outcome in crew.outcomes() if "token" in outcome]
    holders: defaultdict[int, set[str]] = defaultdict(set)
    for outcome in outcomes:
        holders[outcome["token"]].add(outcome["worker"])
    assert [(token, names) for token, names in holders.items() if len(names) > 1] == []
    for worker in {outcome["worker"] for outcome in outcomes}:
        tokens = [outcome["token"] for outcome in outcomes if outcome["worker"] == worker]
        assert tokens == sorted(tokens)
    stated = [json.loads(record.value or b"") for record in _in_log(kafka, topic)]
    acquired = {at: each["holder"] for at, each in enumerate(stated) if "token" not in each}
    assert {token: {acquired[token]} for token in holders} == holders


def _tokens(crew: Crew) -> set[tuple[str, int]]:
    return {(each["worker"], each["token"]) for each in crew.outcomes() if "token" in each}


def test_history_of_a_table_is_linearizable(proxy: ProxyProcess, topic: str, kafka: KafkaCluster) -> None:
    with Crew("table", proxy, topic, kafka) as crew:
        crew.wait_for(lambda: sum("done" in outcome for outcome in crew.outcomes()) >= 400)
        workers = [list(worker.outcomes) for worker in (*crew.ended, *crew.workers)]
    history = [call for outcomes in workers for call in _calls(outcomes)]
    assert violations(history) == []
    changes = {call.changed: call.value for call in history if call.changed is not None}
    in_log = {record.offset: record.value for record in _in_log(kafka, topic)}
    assert {version: in_log.get(version) for version in changes} == changes
    assert len(changes) > 50


def _calls(outcomes: list[dict[str, Any]]) -> list[Call]:
    calls: dict[int, Call] = {}
    for outcome in outcomes:
        if "number" in outcome:
            calls[outcome["number"]] = Call(
                outcome["key"], outcome["begin"], outcome["expected"], outcome["value"].encode()
            )
        elif "version" in outcome:
            calls[outcome["done"]].put(outcome["version"], outcome["at"])
        elif "observed" in outcome:
            version, value = outcome["observed"]
            calls[outcome["done"]].observe(version, None if value is None else value.encode(), outcome["at"])
        elif outcome.get("undone") is not None:
            del calls[outcome["undone"]]
    return list(calls.values())


def test_each_item_of_a_queue_has_one_result(proxy: ProxyProcess, topic: str, kafka: KafkaCluster) -> None:
    items = clients.create_topic(proxy.bootstrap, f"items-{topic}")
    count = 700
    with KafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        for number in range(count):
            producer.send(items, b"%d" % number, partition=0)
    with Crew("queue", proxy, topic, kafka) as crew:
        crew.wait_for(lambda: sum(outcome.get("finished", 0) for outcome in crew.outcomes()) >= count * 0.95)
        until(lambda: len(_results(kafka, topic)) == count, "all results")
        outcomes = crew.outcomes()
    assert _results(kafka, topic) == [b"result of %d" % number for number in range(count)]
    assert len({outcome["worker"] for outcome in outcomes if "finished" in outcome}) > 1


def _results(kafka: KafkaCluster, topic: str) -> list[bytes | None]:
    return [record.value for record in _in_log(kafka, topic) if (record.value or b"").startswith(b"result")]
