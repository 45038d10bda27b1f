"""Proves exactly-once processing: transactional applications of every client while applications, proxies and brokers
are killed. `python -m tests.eos_proof` prints the table."""
