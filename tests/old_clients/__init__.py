"""Releases of client libraries from former years: what each installs, pinned by hash, and a program for all of them.

`uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate` makes such a file.
"""
