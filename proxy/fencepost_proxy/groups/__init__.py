"""Consumer groups of topics that grew in order: a new partition is kept from a group until it has read the priors.

No I/O here. `net/groups.py` asks Kafka what these decide by, `session/exchange.py` has them change what passes.
"""
