"""Consumer groups of topics with ordered expansions: gate a new partition until the group has read the prior ones.

No I/O here. `net/groups.py` queries Kafka for the decisions, `session/rewriters.py` applies the changes to answers.
"""
