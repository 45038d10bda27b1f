"""The jobs that compare-and-append is used for, as small classes over a LogWriter: docs/recipes/.

These are for the log writers of kafka-python and confluent-kafka. `fencepost.recipes.aiokafka` has the same classes,
awaited. Each keeps its state in one partition, in a documented format.
"""

from __future__ import annotations

from fencepost.recipes._leader import Claim, LeaderBase
from fencepost.recipes._recipe import BlockingRecipe, blocking
from fencepost.recipes._registry import Entry, RegistryBase, SequenceBase


class Leader(BlockingRecipe, LeaderBase):
    __doc__ = LeaderBase.__doc__

    read_to_end = blocking(LeaderBase._read_to_end)
    claim = blocking(LeaderBase._claim)
    append = blocking(LeaderBase._append)


class Registry(BlockingRecipe, RegistryBase):
    __doc__ = RegistryBase.__doc__

    register = blocking(RegistryBase._register)
    get = blocking(RegistryBase._get)


class Sequence(BlockingRecipe, SequenceBase):
    __doc__ = SequenceBase.__doc__

    take = blocking(SequenceBase._take)


__all__ = ["Claim", "Entry", "Leader", "Registry", "Sequence"]
