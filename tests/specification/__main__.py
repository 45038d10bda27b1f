"""`python -m tests.specification`: check all models, and print what TLC found. `make specification`.

`--trace NAME` prints the counterexample of the models whose name contains NAME.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.specification import tlc
from tests.specification.models import MODELS, Model

#: Larger than any bound needs on a busy machine.
TIMEOUT_SECONDS = 1800.0


def check(model: Model, timeout_seconds: float) -> tuple[tlc.Checked, str | None]:
    """What TLC found, and what is wrong with that."""
    found = tlc.check(
        model.module, model.constants, model.promises, timeout_seconds=timeout_seconds, symmetry=model.symmetry
    )
    if found.violated != model.violates:
        return found, f"violated: {found.violated}, expected: {model.violates}\n{found.counterexample}"
    if found.distinct_states < model.states_min:
        return found, f"{found.distinct_states} states, expected at least {model.states_min}: the model is too narrow"
    return found, None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.specification", description=__doc__)
    parser.add_argument("names", nargs="*", help="only models whose names contain one of these")
    parser.add_argument("--small", action="store_true", help="only the models of make test")
    parser.add_argument("--trace", action="store_true", help="print the counterexamples")
    options = parser.parse_args()
    wrong = 0
    for model in MODELS:
        if (options.names and not any(each in model.id for each in options.names)) or (
            options.small and not model.small
        ):
            continue
        began = time.monotonic()
        try:
            found, problem = check(model, TIMEOUT_SECONDS)
        except tlc.TlcError as error:
            print(f"{model.id}: {error}")
            wrong += 1
            continue
        print(
            f"{model.module:13} {found.distinct_states:8,} states {time.monotonic() - began:5.1f} s  "
            f"{found.violated or 'no violation':30} {model.name}",
            flush=True,
        )
        wrong += problem is not None
        if problem is not None:
            print(problem)
        elif options.trace:
            print(found.counterexample)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
