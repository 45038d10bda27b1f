"""`python -m tests.spark_faults`: run each fault with both sinks. Prints the table, and the refusals.

Exit status 1: with our sink, rows are missing, duplicated, out of order or unknown; or Spark's sink shows no
duplicates, so that the counting is no evidence.
"""

from __future__ import annotations

from tests.kit.campaigns import Campaign, campaign, leave
from tests.spark_faults import run
from tests.spark_faults.faults import FAULTS
from tests.spark_faults.query import SINKS
from tests.spark_faults.stage import stage

_BY_NAME = {fault.name: fault for fault in FAULTS}
ARGUMENTS = {
    "--fault": {"action": "append", "choices": list(_BY_NAME), "help": "this one; may be given several times"},
    "--sink": {"choices": SINKS, "help": "of the two, this one"},
    "--list": {"action": "store_true", "help": "name the faults"},
}


def prove(this: Campaign) -> bool:
    options = this.options
    if options.list:
        for fault in FAULTS:
            print(f"{fault.name:20} {fault.reported}")
        return True
    chosen = [_BY_NAME[name] for name in options.fault or _BY_NAME]
    with stage(this.directory) as ready:
        result = run.run(ready, chosen, (options.sink,) if options.sink else SINKS, say=this.say)
    print("\n".join(["", *run.table(result)]))
    return result.holds


if __name__ == "__main__":
    leave(campaign("spark_faults", prove, ARGUMENTS))
