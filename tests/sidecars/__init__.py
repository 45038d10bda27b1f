"""Three brokers with a sidecar each, and leaders that move: is every conditional append at its expected offset?

`stage.py` has the cluster, `run.py` the run.
"""
