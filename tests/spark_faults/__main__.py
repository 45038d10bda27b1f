"""`python -m tests.spark_faults`: run each fault with both sinks. Prints the table, and the refusals.

Exit status 1: with our sink, rows are missing, duplicated, out of order or unknown; or Spark's sink shows no
duplicates, so that the counting is no evidence.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from pathlib import Path

from tests.spark_faults import run
from tests.spark_faults.faults import FAULTS
from tests.spark_faults.query import SINKS
from tests.spark_faults.stage import stage


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.spark_faults")
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--fault", action="append", choices=names, help="this one; may be given several times")
    parser.add_argument("--sink", choices=SINKS, help="of the two, this one")
    parser.add_argument("--list", action="store_true", help="name the faults")
    options = parser.parse_args()
    if options.list:
        for fault in FAULTS:
            print(f"{fault.name:20} {fault.reported}")
        return 0
    logging.basicConfig(level=logging.CRITICAL)
    directory = Path(tempfile.mkdtemp(prefix="fencepost-spark-faults-"))
    by_name = {fault.name: fault for fault in FAULTS}
    chosen = [by_name[name] for name in options.fault or names]
    with stage(directory) as ready:
        sinks = (options.sink,) if options.sink else SINKS
        result = run.run(ready, chosen, sinks, say=lambda text: print(text, flush=True))
    print("\n".join(["", *run.table(result)]))
    if result.holds:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"\nthe logs of proxy and drivers are in {directory}")
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
