"""`python -m tests.foreign`: run other projects' tests at Kafka and through the proxy, and print the differences.

Exit status 1: `explained.py` does not explain a difference, or no test of a suite passes at Kafka.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.foreign import page
from tests.foreign.compare import compare
from tests.foreign.suites import PASSED, SUITES, Missing

_BUILD = Path(__file__).parents[2] / "build" / "foreign"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.foreign", description=__doc__.partition("\n")[0])
    parser.add_argument("--suites", default=",".join(each.name for each in SUITES), help="by commas (default: all)")
    parser.add_argument("--only", help="these tests of the suite, by commas")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="checkouts of what no package registry has")
    parser.add_argument("--write", action="store_true", help="the tables into docs/foreign-tests.md, too")
    options = parser.parse_args()
    _BUILD.mkdir(parents=True, exist_ok=True)
    logs = Path(tempfile.mkdtemp(prefix="fencepost-foreign-"))
    compared, skipped = [], {}
    for suite in SUITES:
        if suite.name not in options.suites.split(","):
            continue
        try:
            root = suite.get(_BUILD, options.sources)
        except Missing as missing:
            print(f"{suite.name} {suite.version} is skipped: {missing}", flush=True)
            skipped[suite.name] = str(missing)
            continue
        compared.append(compare(suite, root, logs, options.only.split(",") if options.only else None))
    print(f"\n{page.made(compared, skipped)}\nlogs: {logs}")
    if options.write:
        page.write(compared, skipped)
    unexplained = [f"{each.suite} {test}" for each in compared for test in each.unexplained]
    print("\n  ".join([f"{len(unexplained)} unexplained differences", *unexplained]))
    for each in compared:
        if PASSED not in each.direct.values():
            print(f"{each.suite}: no test passed at Kafka: {logs / each.suite}")
    return 1 if unexplained or not all(PASSED in each.direct.values() for each in compared) else 0


if __name__ == "__main__":
    sys.exit(main())
