"""Three brokers, a sidecar before each, leaders that move: is every conditional append where it expected to be?

`stage.py` has the cluster, `run.py` the story.
"""
