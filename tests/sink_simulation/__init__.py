"""The sink's algorithm on a model of the log, with all going wrong that can. `python -m tests.sink_simulation`."""
