"""Old and new releases of clients, each with one program (`programs`) at Kafka and through the proxy.

Python releases are pinned by hash in `pinned`; `uv pip compile --universal --python-version 3.11 --generate-hashes
--no-header --no-annotate` makes such a file. Java releases are those of the jar locks. Go verifies modules by its
checksum database, npm's package is verified by `releases.py`.
"""
