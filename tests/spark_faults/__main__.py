"""`python -m tests.spark_faults`: run each fault with both sinks. Prints the table, and the refusals.

Exit status 1: with our sink, rows are missing, duplicated, out of order or unknown; or Spark's sink shows no
duplicates, so that the counting is no evidence.
"""

from __future__ import annotations

import argparse
import sys

from tests.kit.proofs import Proof
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
    this = Proof("spark-faults")
    by_name = {fault.name: fault for fault in FAULTS}
    chosen = [by_name[name] for name in options.fault or names]
    with stage(this.directory) as ready:
        sinks = (options.sink,) if options.sink else SINKS
        result = run.run(ready, chosen, sinks, say=this.say)
    print("\n".join(["", *run.table(result)]))
    return this.end(result.holds)


if __name__ == "__main__":
    sys.exit(main())
