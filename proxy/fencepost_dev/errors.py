"""Errors of the development environment; each message is one line that says what to do."""

from __future__ import annotations

from fencepost_proxy.errors import FencepostError


class DevError(FencepostError):
    """Kafka cannot run on this machine. Shown without a stack trace."""


class JavaError(DevError):
    """No usable Java was found."""


class JarError(DevError):
    """A jar cannot be downloaded, or its hash differs from the lock file."""


class PortTakenError(DevError):
    """A requested port is in use."""


class ClusterError(DevError):
    """A broker did not start, or exited; the message names its log file."""


class ToolError(DevError):
    """A Kafka tool or the Java compiler failed; the message contains its output."""
