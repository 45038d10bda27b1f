"""Consumer groups of topics with ordered expansions: a new partition is gated until prior partitions are read.

No I/O here. `services/groups.py` queries Kafka for the decisions, `session/rewriters.py` changes the answers.
"""
