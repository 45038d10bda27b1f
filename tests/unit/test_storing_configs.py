"""A change of virtual configs whose client waits for an answer: it gets one, whatever happens here."""

from __future__ import annotations

import asyncio
import logging

import pytest

from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.net.app import Proxy
from fencepost_proxy.session.messages import Store, Stored
from fencepost_proxy.types import Address


def test_a_change_that_crashes_here_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def store() -> list[object]:
        proxy = Proxy(ProxyConfig(upstream=(Address("127.0.0.1", 1),)))
        told: list[object] = []
        monkeypatch.setattr(proxy, "session_event", lambda connection, event: told.append(event))
        await proxy._store(1, Store(token=5, changes=()))  # before there is a state topic: a mistake of our own
        return told

    with caplog.at_level(logging.ERROR):
        told = asyncio.run(store())

    assert told == [Stored(5, "it failed in the proxy, whose log says where")]
    assert "storing virtual configs crashed" in caplog.text
