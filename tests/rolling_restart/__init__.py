"""Two proxies in front of one Kafka are restarted, one after the other, under load of every client: what is lost of it?

`run.py` is the story, `writers.py` who writes; who reads is `tests/support/members.py`. What was appended is counted in
Kafka itself, around both proxies.
"""
