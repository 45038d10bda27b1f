"""What can go wrong with the sink. Who reads a `SinkError` can do something about it, and it says what."""

from __future__ import annotations

import pickle

from fencepost.errors import FencepostError


class SinkError(FencepostError):
    """The write cannot go on, and trying again as it is would not help. Nothing was appended twice."""


class LogRefused(SinkError):
    """Kafka or the proxy refuses for good: no rights, no such topic, credentials that are not known."""


class NotBegun(SinkError, pickle.PickleError):
    """The driver could not begin a micro-batch. It finds out while Spark pickles the writer, and Spark's serializer
    lets a `PickleError` pass as it is; any other error it would wrap in a `PicklingError`."""


class Unknown(Exception):
    """What became of an append is not known: the connection was lost, or no answer came in time."""


class CannotReach(Exception):
    """A look at the log or the cluster did not work out this time; the next may."""
