"""History checks on a real cluster: `make soak MINUTES=20`, or `python -m tests.soak --minutes 20 --seed 7`.

Three brokers, two proxies, and fault proxies (`tests/kit`) that can cut or delay any connection at a given byte. Real
clients of every kind compete for the same partitions while brokers, proxies and connections fail on a schedule from a
seed. At the end, every response is compared with Kafka's log.

| file | contents |
|---|---|
| `run.py` | one run, from the start to the result |
| `stage.py` | brokers, proxies, connections |
| `writers.py` | the kinds of writers, raw ones and those of `tests/kit/writers.py` |
| `faults.py` | the schedule of faults |
| `tests/kit/` | `history.py`: responses and log; `checker.py`: the rules, and what the contract tolerates |

A seed gives the same schedule, but not the same run, since machines differ. So a failed run keeps its history:
`python -m tests.soak --check DIRECTORY` checks it again. `--no-fencing` shows that the checker finds violations: the
proxies compare offsets themselves, without Kafka.
"""
