"""Two proxies of one Kafka are restarted in turn under load of every client: what is lost?

`run.py` runs the restarts, with the writers of `tests/kit/writers.py` and the readers of `tests/support/members.py`.
Appended records are counted in Kafka, without the proxies.
"""
