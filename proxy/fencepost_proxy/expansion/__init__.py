"""Ordered partition expansion (KIP-253). No I/O here.

`services/expansions.py` runs the procedure. `services/groups.py` queries Kafka for the decisions about consumer groups,
and `session/control/rewriters.py` changes the answers.
"""
