"""History checks on a real cluster: `make soak MINUTES=20`, or `python -m tests.soak --minutes 20 --seed 7`.

Three brokers, two proxies, every connection through a pipe that can be cut or delayed at a byte; real clients of every
kind race for the same partitions while brokers, proxies and wires fail by a schedule from a seed. What each operation
was told is held against the log that Kafka has in the end.

| file | what it is |
|---|---|
| `run.py` | one run: who writes where, from the start to the verdict |
| `stage.py`, `pipe.py` | brokers, proxies, wires |
| `writers.py`, `java.py` | the clients, and what each makes of its answers |
| `faults.py` | what goes wrong, and when |
| `history.py`, `log.py` | what was told, what is there: two files of lines of JSON |
| `checker.py` | the judge: rules, and what the contract lets be |

A schedule is the same for the same seed; what its faults meet is not, since machines differ. So a run that found
something keeps its history and log: `python -m tests.soak --check DIRECTORY` judges them again. `--no-stamping` shows
that there is something to find: proxies that compare by themselves and leave Kafka out of it.
"""
