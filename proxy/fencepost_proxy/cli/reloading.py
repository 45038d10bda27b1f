"""SIGHUP: the configuration is read anew, and what a running proxy can take over, it takes over."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.config import ProxyConfig, Refused
from fencepost_proxy.config.reading import Loaded
from fencepost_proxy.errors import ConfigError

_log = logs.get("cli")
_ERRORS_TOLD_MAX: Final = 20


class Running:
    """`config` – what holds now. `read` – reads file, environment and command line as at the start."""

    def __init__(self, config: ProxyConfig, read: Callable[[], Loaded]) -> None:
        self.config = config
        self._read = read
        self._asked_early = False

    def listen(self) -> None:
        """Until a loop does: who asks while the process starts would end it otherwise, and is not forgotten."""

        def remember(*_: object) -> None:
            self._asked_early = True

        signal.signal(signal.SIGHUP, remember)

    def listen_in(self, loop: asyncio.AbstractEventLoop, reload: Callable[[], None]) -> None:
        loop.add_signal_handler(signal.SIGHUP, reload)
        if self._asked_early:
            loop.call_soon(reload)

    def read_anew(self) -> ProxyConfig:
        """What holds from now on; where something is wrong, what held before. Tells what came of it."""
        from fencepost_proxy.config.reloading import changes  # noqa: PLC0415 - not for a start

        try:
            loaded = self._read()
            found = changes(self.config, loaded.config)
            _try_certificates(self.config, found.config)
        except ConfigError as error:
            problems = error.problems if isinstance(error, Refused) else [error]
            for each in problems[:_ERRORS_TOLD_MAX]:
                _log.error("the configuration is wrong: the old one stays in force", reason=each)
            return self.config
        self.config = found.config
        told: dict[str, object] = {"changed": "; ".join(found.changed) or "nothing"}
        if found.left:
            told["needs_restart"] = "; ".join(found.left)
        log = _log.warning if found.left else _log.info
        log("configuration read anew", file=loaded.file or "none", **told)
        return self.config


def _try_certificates(before: ProxyConfig, after: ProxyConfig) -> None:
    """Before anything is changed. Raises ConfigError."""
    from fencepost_proxy.net.certificates import listener_context, upstream_context  # noqa: PLC0415 - not for a start

    if after.listen_tls is not None and after.listen_tls != before.listen_tls:
        listener_context(after.listen_tls)
    if after.upstream_tls is not None and after.upstream_tls != before.upstream_tls:
        upstream_context(after.upstream_tls)
