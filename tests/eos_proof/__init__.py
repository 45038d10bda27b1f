"""Exactly once, shown: what applications of every client wrote in transactions, while applications, proxies and brokers
were killed. `python -m tests.eos_proof` prints the table."""
