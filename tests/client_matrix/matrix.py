"""What each release observes at Kafka and through the proxy, with and without TLS and login."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.client_matrix.releases import Given, Release
from tests.kit.waiting import until
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log
from tests.support.sasl_ssl import ADMIN, Secured, password, sasl_ssl_kafka, token

_CHECKS = """
[topics."proxied-*"]
"fencepost.check.expected.offsets" = "true"
"""


@dataclass(frozen=True)
class Scene:
    """`plain`, `login` – the proxies of the listeners without and with TLS and login."""

    secured: Secured
    plain: ProxyProcess
    login: ProxyProcess


@contextmanager
def scene(directory: Path) -> Iterator[Scene]:
    with sasl_ssl_kafka(directory / "kafka") as secured:
        kafka = secured.kafka
        (directory / "plain").mkdir()
        (directory / "login").mkdir()
        with (
            ProxyProcess(kafka.bootstrap, directory / "plain", config=_CHECKS) as plain,
            ProxyProcess(
                kafka.bootstrap_of("SECURED"), directory / "login", config=secured.proxy_config() + _CHECKS
            ) as login,
        ):
            yield Scene(secured, plain, login)


def compare(scene: Scene, release: Release, mechanism: str, directory: Path) -> None:
    """Fail if the release observes something else through the proxy than at Kafka."""
    if mechanism and mechanism not in release.mechanisms:
        pytest.skip(f"{release} has no {mechanism}, or Kafka refuses it")
    secured, proxy = scene.secured, scene.login if mechanism else scene.plain
    kafka = secured.kafka.bootstrap_of("SECURED") if mechanism else secured.kafka.bootstrap
    java = directory / "java"
    observed = {}
    for where, bootstrap in (("direct", kafka), ("proxied", proxy.bootstrap)):
        topic = f"{where}-{release}-{mechanism}"
        with Connection(secured.kafka.bootstrap) as admin:
            assert admin.create_topic(topic) == (0, None)
        until(lambda topic=topic: Log(secured.kafka.bootstrap).end(topic) == 0, f"the leader of {topic}")
        settings = {"bootstrap.servers": bootstrap, **(secured.java(ADMIN, mechanism) if mechanism else {})}
        java.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        observed[where] = release.observed(
            Given(
                bootstrap=bootstrap,
                topic=topic,
                group=topic,
                transaction=topic,
                mechanism=mechanism,
                user=ADMIN,
                password=password(ADMIN),
                token=token(ADMIN),
                ca_file=str(secured.authority.file),
                codecs=release.codecs,
                refused=where == "proxied",
                java=str(java),
            )
        )

    refused, after = observed["proxied"].pop("refused"), observed["proxied"].pop("after")
    assert "polic" in refused.lower()
    assert "polic" not in after.lower()
    assert observed["proxied"] == observed["direct"]
    assert set(release.codecs) < set(observed["direct"])
