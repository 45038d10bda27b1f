"""Old releases of client libraries: a requirements file for each, pinned by hash, and one program for all of them.

`uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate` makes such a file.
"""
