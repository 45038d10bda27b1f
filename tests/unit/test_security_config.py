"""Certificate files that change, and the metrics of TLS and logins."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost_proxy.config import ListenTls, UpstreamTls
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.exposition import exposition
from fencepost_proxy.transport.certificates import Certificates
from tests.support.certificates import Authority


def test_changed_files_are_reloaded_unless_broken(tmp_path: Path) -> None:
    # Given: a listener's certificate, and brokers' authority.
    authority = Authority(tmp_path / "authority")
    one, two = authority.sign("one", days=5), authority.sign("two", days=10)
    file, trusted = tmp_path / "both.pem", tmp_path / "trusted.pem"
    file.write_bytes(one.both.read_bytes())
    trusted.write_bytes(authority.file.read_bytes())
    certificates = Certificates(ListenTls(file), UpstreamTls(trusted))
    listener, upstream = certificates.listener, certificates.upstream
    ends = certificates.not_after()
    assert set(ends) == {"listener"}

    # Then: as long as nothing has changed, nothing is read.
    assert certificates.probe() == []
    assert certificates.listener is listener

    # When: it is broken or deleted, the old one stays.
    file.write_text("in the middle of being written")
    assert certificates.probe() == [False]
    assert certificates.probe() == []
    file.unlink()
    assert certificates.probe() == [False]
    assert (certificates.listener, certificates.not_after()) == (listener, ends)

    # Nor is one that no client would accept.
    file.write_bytes(authority.sign("old", days=-1).both.read_bytes())
    assert certificates.probe() == [False]
    assert (certificates.listener, certificates.not_after()) == (listener, ends)

    # When: there is another one, new connections get it.
    file.write_bytes(two.both.read_bytes())
    assert certificates.probe() == [True]
    assert certificates.listener is not listener
    assert certificates.upstream is upstream
    assert certificates.not_after()["listener"] - ends["listener"] > 4 * 86_400

    # And: all of them are read on request.
    assert certificates.probe(at_once=True) == [True, True]
    assert certificates.upstream is not upstream


def test_start_with_missing_or_expired_certificate_is_refused(tmp_path: Path) -> None:
    old = Authority(tmp_path / "authority").sign("old", days=-1)
    with pytest.raises(ConfigError, match=r"listen_tls\.certificate_file: .*old\.pem expired on "):
        Certificates(ListenTls(old.certificate, old.key), None)
    with pytest.raises(ConfigError, match=r"listen_tls\.certificate_file: .*absent cannot be read: No such file"):
        Certificates(ListenTls(tmp_path / "absent"), None)


def test_tls_and_login_metrics_are_exported() -> None:
    metrics = Metrics()
    for result in ("ok", "ok", "ok", "not_tls"):
        metrics.tls_handshakes.inc(result)
    metrics.upstream_tls_failures.inc("untrusted")
    metrics.logged_in(True)
    metrics.logged_in(False)
    metrics.certificates_loaded(False)
    metrics.certificates_end({"listener": 2_000_000_000.0})

    text = exposition(metrics).decode()

    for line in (
        'fencepost_tls_handshakes_total{result="ok"} 3.0',
        'fencepost_tls_handshakes_total{result="not_tls"} 1.0',
        'fencepost_upstream_tls_failures_total{reason="untrusted"} 1.0',
        'fencepost_control_logins_total{result="ok"} 1.0',
        'fencepost_control_logins_total{result="failed"} 1.0',
        'fencepost_certificate_reloads_total{result="failed"} 1.0',
        'fencepost_certificate_not_after_timestamp_seconds{of="listener"} 2000000000.0',
    ):
        assert f"{line}\n" in text
