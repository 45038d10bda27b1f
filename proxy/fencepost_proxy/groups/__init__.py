"""Consumer groups of topics with ordered expansions: a new partition is gated until prior partitions are read.

No I/O here. `net/groups.py` queries Kafka for the decisions, `session/rewriters.py` applies the changes to answers.
"""
