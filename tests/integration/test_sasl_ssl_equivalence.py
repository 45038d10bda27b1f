"""The scripts of `test_equivalence` with TLS and a login, at Kafka and through the proxy.

Each client uses another mechanism and runs the scripts with the most sends and waits. The long run covers all scripts
with all mechanisms on three brokers (`python -m tests.sasl_ssl_proof`).
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_equivalence import SCRIPTS, skip_what_kafka_lacks
from tests.sasl_ssl_proof import both, play
from tests.support.java_clients import JAVA_SCRIPTS
from tests.support.proxy import ProxyProcess
from tests.support.sasl_ssl import Secured, sasl_ssl_kafka

pytestmark = [pytest.mark.kafka]

MECHANISMS = {
    "Java": "OAUTHBEARER",
    "kafka-python": "PLAIN",
    "aiokafka": "SCRAM-SHA-256",
    "confluent-kafka": "SCRAM-SHA-512",
}
#: The other scripts differ in their requests, not in how bytes are relayed.
SHORT = [each for each in SCRIPTS if re.search("produce|transactions|group", each)]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    # No authorizer: its rules apply to the whole cluster, and both runs are concurrent.
    with sasl_ssl_kafka(tmp_path_factory.mktemp("kafka"), more={"authorizer.class.name": ""}) as secured:
        yield secured


@pytest.fixture(scope="module")
def proxy(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    upstream = secured.kafka.bootstrap_of("SECURED")
    config = secured.proxy_config("SCRAM-SHA-512")
    with ProxyProcess(upstream, tmp_path_factory.mktemp("proxy"), config=config) as proxy:
        yield proxy


@pytest.mark.parametrize("scripts", [*([each] for each in SHORT), list(JAVA_SCRIPTS)], ids=lambda each: each[0])
def test_client_sees_same_responses_with_tls_and_login(
    secured: Secured, proxy: ProxyProcess, scripts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kafka may not answer a TLS shutdown right after an append with acks=0.
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 1.0)
    for script in scripts:
        skip_what_kafka_lacks(script)
    mechanism = MECHANISMS[scripts[0].partition(":")[0]]

    direct, proxied = both(
        lambda where: play(scripts, where, brokers=1, secured=secured, mechanism=mechanism, directory=tmp_path),
        secured.kafka.bootstrap_of("SECURED"),
        proxy.bootstrap,
    )

    for script in scripts:
        assert proxied[script] == direct[script]
        assert len(direct[script]) > 20


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_all_clients_see_the_same_by_all_mechanisms() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.sasl_ssl_proof"], capture_output=True, text=True, timeout=5000, check=False
    )

    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-2_000:]
