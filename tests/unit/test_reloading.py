"""SIGHUP: what a running proxy applies of a changed file, what needs a restart, and invalid files."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost_proxy import logs
from fencepost_proxy.cli.reloading import Running
from fencepost_proxy.config import ProxyConfig, Refused
from fencepost_proxy.config.keys import KEYS
from fencepost_proxy.config.reading import read
from fencepost_proxy.config.reloading import changes
from fencepost_proxy.server import Proxy
from tests.support.certificates import Authority

Write = Callable[[str], Path]
#: Applied by `Proxy.reload`, or read from the configuration each time.
LIVE = {
    "limits.connections_max",
    "limits.address_connections_max",
    "limits.in_flight_requests_max",
    "limits.buffered_bytes_max",
    "limits.sequencer_wait_max_seconds",
    "limits.handshake_seconds",
    "limits.header_seconds",
    "limits.client_idle_seconds",
    "limits.watched_shown_max",
    "limits.metric_partitions_shown_max",
    "limits.drain_seconds",
    "limits.drain_notice_seconds",
    "log.level",
    "log.format",
    *(f"listen_tls.{name}" for name in ("certificate_file", "key_file", "key_password_file")),
    *(f"listen_tls.{name}" for name in ("client_certificates", "client_ca_file", "min_version")),
    *(f"upstream_tls.{name}" for name in ("ca_file", "certificate_file", "key_file", "key_password_file")),
    *(f"upstream_tls.{name}" for name in ("check_hostname", "min_version")),
    *(f"control_sasl.{name}" for name in ("mechanism", "username", "password_file", "token_file")),
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "fencepost.toml"
        path.write_text(f'upstream = ["a:1"]\n{text}', encoding="utf-8")
        return path

    return write


def loaded(file: Path) -> ProxyConfig:
    return read(file).config


def test_documented_live_keys_are_those_that_change() -> None:
    assert {key.name for key in KEYS.values() if key.live} == LIVE


def test_login_changes_as_a_whole(write: Write) -> None:
    running = loaded(write('[control_sasl]\nmechanism = "PLAIN"\nusername = "a"\npassword_file = "/a"\n'))
    requested = loaded(write('[control_sasl]\nmechanism = "OAUTHBEARER"\ntoken_file = "/t"\n'))
    assert changes(running, requested).config == requested


def test_live_keys_change_and_others_are_named(write: Write) -> None:
    running = loaded(write('status = "s:1"\n[limits]\ndrain_seconds = 3\n[upstream_tls]\nca_file = "/one"\n'))
    requested = loaded(
        write(
            'listen = "b:2"\nreuse_port = true\n[log]\nlevel = "debug"\n[limits]\nconnect_timeout_seconds = 9\n'
            '[upstream_tls]\nca_file = "/two"\n[control_sasl]\nmechanism = "OAUTHBEARER"\ntoken_file = "/t"\n'
            '[topics.x]\n"fencepost.check.expected.offsets" = "true"\n'
        )
    )

    found = changes(running, requested)

    assert set(found.changed) == {
        "limits.drain_seconds: 3.0 → 10.0",
        'log.level: "info" → "debug"',
        'upstream_tls.ca_file: "/one" → "/two"',
    }
    assert set(found.left) == {
        'listen: "127.0.0.1:19092" → "b:2"',
        'status: "s:1" → not set',
        "reuse_port: false → true",
        "limits.connect_timeout_seconds: 5.0 → 9.0",
        'topics: {} → { x = { "fencepost.check.expected.offsets" = "true" } }',
        'control_sasl.mechanism: not set → "OAUTHBEARER"',
        'control_sasl.token_file: not set → "/t"',
        "control_sasl: was added",
    }
    config = found.config
    assert (config.limits.drain_seconds, config.limits.connect_timeout_seconds) == (10.0, 5.0)
    assert (config.log.level, config.reuse_port, config.listen) == ("debug", False, running.listen)
    assert config.upstream_tls == requested.upstream_tls
    assert config.control_sasl is None
    # And: the second time, only what still waits for its restart.
    again = changes(config, requested)
    assert (again.config, list(again.changed), set(again.left)) == (config, [], set(found.left))


def test_tls_cannot_be_switched_on_in_running_proxy(write: Write) -> None:
    running = loaded(write(""))

    found = changes(running, loaded(write('[listen_tls]\ncertificate_file = "/c"\n')))

    assert found.config == running
    assert "listen_tls: was added" in found.left
    assert list(found.changed) == []


def test_change_invalid_without_restart_is_refused(write: Write) -> None:
    """The smaller memory applies at once and would not hold a frame of the size that applies until the restart."""
    running = loaded(write(""))
    requested = loaded(write("[limits]\nframe_bytes_max = 1000000\nbuffered_bytes_max = 2000000\n"))

    with pytest.raises(Refused, match=r"limits\.buffered_bytes_max: is 2000000 and must not be below"):
        changes(running, requested)


# --- in a process -----------------------------------------------------------------------------------------------------


def test_reloaded_file_applies_unless_it_is_invalid(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fencepost")
    file = write("[limits]\ndrain_seconds = 3\n")
    running = Running(loaded(file), lambda: read(file))

    def stated() -> list[tuple[str, dict[str, str]]]:
        found = [
            (each.getMessage(), {k: str(v) for k, v in vars(each)["fencepost_fields"].items()})
            for each in caplog.records
        ]
        caplog.clear()
        return found

    # When: it changes, one line reports that.
    write("[limits]\ndrain_seconds = 4\n")
    assert running.reread().limits.drain_seconds == 4.0
    assert stated() == [
        ("configuration reloaded", {"file": str(file), "changed": "limits.drain_seconds: 3.0 → 4.0"}),
    ]

    # When: it does not change, that is logged too.
    running.reread()
    assert stated() == [("configuration reloaded", {"file": str(file), "changed": "nothing"})]

    # When: it is invalid, nothing changes, and each error is logged with its line.
    write("[limits]\ndrain_seconds = 5\nheader_secs = 1\nhandshake_seconds = 0\n")
    before = running.config
    assert running.reread() is before
    assert [fields["reason"] for _, fields in stated()] == [
        f"{file}:4: limits.header_secs: unknown key; did you mean 'header_seconds'?",
        f"{file}:5: limits.handshake_seconds: must be above 0, not 0.0",
    ]
    write("listen = \n")
    assert running.reread() is before
    assert f"{file}:2: is not TOML" in stated()[0][1]["reason"]
    file.unlink()
    assert running.reread() is before
    assert "cannot be read: No such file" in stated()[0][1]["reason"]

    # And: it is read again when it is right again.
    write("[limits]\ndrain_seconds = 6\n")
    assert running.reread().limits.drain_seconds == 6.0


def test_unusable_certificate_prevents_the_whole_reload(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path / "authority")
    one, two = authority.sign("one"), authority.sign("two")
    text = '[listen_tls]\ncertificate_file = "{}"\nkey_file = "{}"\n[limits]\ndrain_seconds = {}\n'
    file = write(text.format(one.certificate, one.key, 1))
    running = Running(loaded(file), lambda: read(file))
    before = running.config

    write(text.format(two.certificate, one.key, 2))
    assert running.reread() is before
    assert "listen_tls.key_file: the key in" in str(vars(caplog.records[-1])["fencepost_fields"]["reason"])

    write(text.format(two.certificate, two.key, 2))
    after = running.reread()
    assert after.listen_tls is not None
    assert (after.listen_tls.certificate_file, after.limits.drain_seconds) == (two.certificate, 2.0)


def test_reload_signal_during_start_is_applied_later(write: Write) -> None:
    """By default this signal ends a process."""
    file = write("")
    before = signal.getsignal(signal.SIGHUP)
    reloads: list[ProxyConfig] = []

    async def begin(running: Running) -> None:
        running.listen_with(reloads.append)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(reloads) == 1
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(60):
            while len(reloads) < 2:  # noqa: ASYNC110 - a signal sets no event
                await asyncio.sleep(0.01)

    try:
        running = Running(loaded(file), lambda: read(file))
        running.listen()
        os.kill(os.getpid(), signal.SIGHUP)
        asyncio.run(begin(running))
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_proxy_uses_reloaded_limits_certificates_and_logging(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the proxy keeps outside the configuration."""
    authority = Authority(tmp_path / "authority")
    one, two = authority.sign("one", days=5), authority.sign("two", days=10)
    text = '[listen_tls]\ncertificate_file = "{}"\nkey_file = "{}"\n[limits]\n{}'
    sasl = '\n[control_sasl]\nmechanism = "OAUTHBEARER"\ntoken_file = "/{}"\n'
    before = loaded(write(text.format(one.certificate, one.key, sasl.format("one"))))
    logged: list[tuple[str, str]] = []
    monkeypatch.setattr(logs, "change", lambda *how: logged.append(how))
    limits = "in_flight_requests_max = 7\nsequencer_wait_max_seconds = 1\nbuffered_bytes_max = 200000000\n"
    limits += '[log]\nlevel = "debug"\n'
    after = changes(before, loaded(write(text.format(two.certificate, two.key, limits + sasl.format("two"))))).config

    proxy = Proxy(before)
    context, ends = proxy._certificates.listener, proxy._certificates.not_after()
    assert proxy._memory.reserve(100_000_000)

    proxy.reload(after)

    assert proxy._live.config == after
    login = proxy._cluster.kafka.pool.bootstrap[0]._access.sasl
    assert login is not None
    assert login.token_file == Path("/two"), "for the next login"
    assert proxy._services.in_flight_requests_max == 7
    assert proxy._services.sequencer_wait_max_seconds == 1.0
    assert proxy._certificates.listener is not context
    assert proxy._certificates.not_after() != ends
    # Bytes that are already buffered count.
    assert not proxy._memory.reserve(100_000_001)
    assert proxy._memory.reserve(100_000_000)
    await proxy.close()
    assert logged == [("debug", "console")]
