"""Errors of the sink. A `SinkError` names the action to take."""

from __future__ import annotations

import pickle

from fencepost.errors import FencepostError


class SinkError(FencepostError):
    """The write cannot continue, and an unchanged retry fails again. Nothing was appended twice."""


class LogRefused(SinkError):
    """Kafka or the proxy refuses permanently: no permission, unknown topic, invalid credentials."""


class NotBegun(SinkError, pickle.PickleError):
    """The driver could not begin a micro-batch. Raised while Spark pickles the writer: Spark's serializer wraps any
    error except a `PickleError` in a `PicklingError`."""


class Unknown(Exception):
    """The outcome of an append is unknown: the connection was lost or the response timed out."""


class CannotReach(Exception):
    """A read of the log or the cluster failed temporarily."""
