"""The test kit: a TCP proxy with faults, and waiting for a condition."""
