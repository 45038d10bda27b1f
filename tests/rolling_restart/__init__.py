"""Two proxies of one Kafka are restarted in turn under load of every client: what is lost?

`run.py` runs the restarts, `writers.py` has the writers, and `tests/support/members.py` the readers. Appended records
are counted in Kafka, without the proxies.
"""
