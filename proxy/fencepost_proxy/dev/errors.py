"""What can be wrong with this machine, as errors whose one line says what to do about it."""

from __future__ import annotations

from fencepost_proxy.errors import FencepostError


class DevError(FencepostError):
    """The embedded Kafka cannot run here as things are. Shown without a stack trace."""


class JavaError(DevError):
    """There is no usable Java."""


class JarError(DevError):
    """A jar cannot be fetched, or is not the one that the lock file names."""


class PortTakenError(DevError):
    """Somebody else listens on a port that was asked for."""


class ClusterError(DevError):
    """A broker did not start, or ended on its own; the message names its log file."""


class ToolError(DevError):
    """One of Kafka's own tools, or the Java compiler, failed; the message carries what it printed."""
