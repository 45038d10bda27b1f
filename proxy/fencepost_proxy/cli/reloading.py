"""SIGHUP: reloads the configuration and applies the keys that need no restart."""

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
_ERRORS_SHOWN_MAX: Final = 20


class Running:
    """The configuration in force (`config`). `read` reads file, environment and command line as at the start."""

    def __init__(self, config: ProxyConfig, read: Callable[[], Loaded]) -> None:
        self.config = config
        self._read = read
        self._requested_early = False

    def listen(self) -> None:
        """Handles SIGHUP until `listen_with`: by default the signal would end the process. The request is kept."""

        def remember(*_: object) -> None:
            self._requested_early = True

        signal.signal(signal.SIGHUP, remember)

    def listen_with(self, apply: Callable[[ProxyConfig], None]) -> None:
        """Passes the configuration to `apply` at each SIGHUP from now on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: apply(self.reread()))
        if self._requested_early:
            loop.call_soon(lambda: apply(self.reread()))

    def reread(self) -> ProxyConfig:
        """Returns the new configuration, or the old one if the new one is invalid. Logs the result."""
        from fencepost_proxy.config.reloading import changes  # noqa: PLC0415 - not needed at start

        try:
            loaded = self._read()
            found = changes(self.config, loaded.config)
            _try_certificates(self.config, found.config)
        except ConfigError as error:
            problems = error.problems if isinstance(error, Refused) else [error]
            for each in problems[:_ERRORS_SHOWN_MAX]:
                _log.error("configuration invalid: keeping the old one", reason=each)
            return self.config
        self.config = found.config
        reported: dict[str, object] = {"changed": "; ".join(found.changed) or "nothing"}
        if found.left:
            reported["needs_restart"] = "; ".join(found.left)
        log = _log.warning if found.left else _log.info
        log("configuration reloaded", file=loaded.file or "none", **reported)
        return self.config


def _try_certificates(before: ProxyConfig, after: ProxyConfig) -> None:
    """Loads changed certificates before anything is applied. Raises `ConfigError`."""
    from fencepost_proxy.transport.certificates import listener_context, upstream_context  # noqa: PLC0415 - not needed at start

    if after.listen_tls is not None and after.listen_tls != before.listen_tls:
        listener_context(after.listen_tls)
    if after.upstream_tls is not None and after.upstream_tls != before.upstream_tls:
        upstream_context(after.upstream_tls)
