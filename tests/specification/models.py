"""Every model that TLC checks: a module, its constants, and what must come of it.

A *design* has all rules, and no reachable state violates its promises. `states_min` is a floor: a model that reaches
fewer states has become too narrow to show anything. A *sibling* leaves one rule out: TLC must find a counterexample
against the named promise. A *limit* is a case that the contract excludes: TLC must find a counterexample there, too,
and the promises that do hold in it are a design.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

_PROMISES = {
    "FencedAppend": (
        "TypeOK",
        "AppendedWhereExpected",
        "SuccessIsInTheLog",
        "NoTwoOwnARecord",
        "RefusedIsNotInTheLog",
        "NothingFollowsARefusedAppend",
        "AnEpochHasOneBase",
    ),
    "Claims": (
        "TypeOK",
        "AppendedWhereExpected",
        "SuccessIsInTheLog",
        "NothingFollowsARefusedAppend",
        "ClaimsDoNotReturn",
    ),
    "TrueTopic": ("TypeOK", "AppendedWhereExpected", "SuccessIsInTheLog"),
}
_FAULTS = {
    "FencedAppend": (
        "retries",
        "connections",
        "kills",
        "starts",
        "bypasses",
        "elections",
        "restarts",
        "expiries",
        "rejections",
    ),
    "Claims": ("connections", "elections", "restarts", "expiries"),
    "TrueTopic": ("connections", "kills"),
}
_DEFAULTS: dict[str, dict[str, str]] = {
    "FencedAppend": {
        "Processes": "{p1, p2}",
        "Serving": "{p1, p2}",
        "Earlier": "0",
        "Bypassed": "0",
        "Lost": "0",
        "Named": "{}",
        "MaxEpoch": "0",
        "Forgetful": "FALSE",
        "LogAppendTime": "FALSE",
        "Remembered": "2",
        "EpochsPerId": "8",
    },
    "Claims": {
        "Processes": "{p1, p2}",
        "MaxEpoch": "2",
        "SharedEpochs": "3",
        "Forgetful": "TRUE",
        "Remembered": "2",
        "EpochsPerId": "8",
    },
    "TrueTopic": {
        "Processes": "{p1}",
        "Conditional": "{1, 2}",
        "Unconditional": "{3, 4}",
        "Remembered": "5",
        "EpochsPerId": "8",
    },
}
_CONTENTS = "xyzwv"


@dataclass(frozen=True, slots=True)
class Model:
    """`violates`: the promise that TLC must find violated; None: none. `small`: within `make test`."""

    module: str
    name: str
    constants: Mapping[str, str]
    promises: tuple[str, ...]
    violates: str | None = None
    states_min: int = 0
    small: bool = True
    timeout_seconds: float = 240.0

    @property
    def id(self) -> str:
        return f"{self.module}: {self.name}".replace(" ", "_")

    @property
    def symmetry(self) -> str | None:
        """The processes may be permuted, unless they differ from the beginning."""
        serving = self.constants.get("Serving")
        return "Processes" if serving in (None, self.constants["Processes"]) else None


def _model(
    module: str,
    name: str,
    *,
    appends: int = 0,
    sizes: tuple[int, ...] | None = None,
    contents: str | None = None,
    without: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    violates: str | None = None,
    states_min: int = 0,
    small: bool = True,
    constants: Mapping[str, str] | None = None,
    **budget: int,
) -> Model:
    """`budget`: how often each fault happens. `only`: check no other promise."""
    faults = dict.fromkeys(_FAULTS[module], 0)
    assert faults.keys() >= budget.keys(), budget
    values = {**_DEFAULTS[module], **(constants or {})}
    if module != "TrueTopic":
        values["Appends"] = "{" + ", ".join(str(each + 1) for each in range(appends)) + "}"
    if module == "FencedAppend":
        values["Sizes"] = "<<" + ", ".join(map(str, sizes or (1,) * appends)) + ">>"
        values["Contents"] = "<<" + ", ".join(f'"{each}"' for each in contents or _CONTENTS[:appends]) + ">>"
        values["MaxBases"] = str(int(values["MaxEpoch"]) + 2)
    if module == "TrueTopic" or (module == "FencedAppend" and "Serving" not in (constants or {})):
        values.setdefault("Serving", values["Processes"])
        if module == "FencedAppend":
            values["Serving"] = values["Processes"]
    values["Budget"] = "[" + ", ".join(f"{key} |-> {count}" for key, count in {**faults, **budget}.items()) + "]"
    values["Without"] = "{" + ", ".join(f'"{rule}"' for rule in without) + "}"
    return Model(module, name, values, only or _PROMISES[module], violates, states_min, small)


def _sibling(module: str, rule: str, violates: str, **arguments: object) -> Model:
    return _model(module, f"without: {rule}", without=(rule,), violates=violates, **arguments)  # type: ignore[arg-type]


_ONE = {"Processes": "{p1}"}
_BASES = {"MaxEpoch": "1", "Earlier": "1", "Bypassed": "1"}
_ROTATED = {"MaxEpoch": "2", "EpochsPerId": "2", "Earlier": "1", "Bypassed": "1"}
_F, _C, _T = "FencedAppend", "Claims", "TrueTopic"
_SEVERAL = {"Processes": "{p1, p2}", "Serving": "{p1, p2}"}
_SUCCESSOR = {"Processes": "{p1, p2}", "Serving": "{p1}"}

DESIGNS = (
    _model(
        _F,
        "two processes, equal records",
        states_min=10_000,
        appends=2,
        contents="xx",
        retries=1,
        connections=1,
        kills=1,
    ),
    _model(
        _F,
        "one process, pipelined",
        states_min=15_000,
        appends=3,
        retries=1,
        connections=1,
        rejections=1,
        constants=_ONE,
    ),
    _model(
        _F,
        "forgotten producers",
        states_min=5_000,
        appends=2,
        sizes=(1, 2),
        restarts=1,
        expiries=1,
        constants={"Forgetful": "TRUE"},
    ),
    _model(
        _F,
        "elections",
        states_min=4_000,
        appends=2,
        sizes=(1, 2),
        elections=1,
        constants={"Forgetful": "TRUE"},
    ),
    _model(
        _F,
        "new bases and producer ids",
        states_min=2_000,
        appends=2,
        bypasses=1,
        connections=1,
        constants={**_ROTATED, **_ONE},
    ),
    _model(
        _F,
        "a bypassing writer",
        states_min=3_500,
        appends=2,
        bypasses=1,
        constants={"MaxEpoch": "2", "Earlier": "1", "Bypassed": "1"},
    ),
    _model(
        _F,
        "after a pipeline was lost",
        states_min=9_000,
        appends=5,
        constants={**_ONE, "Earlier": "1", "Lost": "2"},
    ),
    _model(_C, "exclusive and shared, takeover", states_min=7_000, appends=3),
    _model(_C, "lost connections", states_min=10_000, appends=2, connections=1),
    _model(_C, "forgotten producers", states_min=15_000, appends=2, restarts=1, expiries=1),
    _model(_C, "elections", states_min=10_000, appends=1, elections=1, constants={"MaxEpoch": "3"}),
    _model(
        _C,
        "the last epochs of a producer id",
        states_min=9_000,
        appends=2,
        connections=1,
        constants={"EpochsPerId": "4", "MaxEpoch": "3", "SharedEpochs": "2"},
    ),
    _model(_T, "one process", states_min=14_000, connections=1),
    _model(_T, "a successor", states_min=23_000, kills=1, constants=_SUCCESSOR),
    _model(
        _T,
        "several processes, all appends conditional",
        states_min=350,
        connections=1,
        constants={**_SEVERAL, "Unconditional": "{}"},
    ),
    # What `required` ensures. On a `true` topic, a process that starts does not know it.
    _model(
        _T,
        "a successor does not wait, all appends conditional",
        states_min=900,
        kills=1,
        connections=1,
        without=("conditional appends wait during a takeover",),
        constants={**_SUCCESSOR, "Unconditional": "{}"},
    ),
    _model(
        _T,
        "several processes: detected",
        states_min=1_800,
        only=("TypeOK", "SuccessIsInTheLog"),
        constants={**_SEVERAL, "Unconditional": "{3}"},
    ),
    # The same with larger bounds: `make specification`.
    _model(
        _F,
        "forgotten producers, elections",
        states_min=80_000,
        appends=2,
        sizes=(1, 2),
        elections=1,
        restarts=1,
        expiries=1,
        constants={"Forgetful": "TRUE"},
        small=False,
    ),
    _model(
        _F,
        "two processes, three appends",
        appends=3,
        contents="xxy",
        sizes=(1, 1, 2),
        retries=1,
        connections=1,
        small=False,
    ),
    _model(_F, "two processes, kills and starts", appends=3, contents="xxy", kills=1, starts=1, retries=1, small=False),
    _model(_F, "one process, two losses", appends=3, retries=1, connections=2, constants=_ONE, small=False),
    _model(
        _F,
        "named writes",
        appends=2,
        contents="xy",
        retries=2,
        connections=1,
        kills=1,
        constants={"Named": "{1, 2}"},
        small=False,
    ),
    _model(_C, "lost connections, three appends", appends=3, connections=1, small=False),
    _model(
        _C,
        "elections, two appends",
        appends=2,
        connections=1,
        elections=1,
        small=False,
    ),
    _model(_T, "one process, two losses", connections=2, small=False),
)

SIBLINGS = (
    _sibling(_F, "log end is read while unconfirmed", "AppendedWhereExpected", appends=3, expiries=1),
    _sibling(
        _F, "one append in flight while unconfirmed", "AppendedWhereExpected", appends=2, rejections=1, constants=_ONE
    ),
    _sibling(_F, "pipelines only while alone", "NothingFollowsARefusedAppend", appends=4),
    _sibling(
        _F,
        "no pipeline while a lost append may be queued",
        "NothingFollowsARefusedAppend",
        appends=5,
        constants={**_ONE, "Earlier": "1", "Lost": "2"},
    ),
    _sibling(
        _F,
        "a new connection is unconfirmed",
        "AppendedWhereExpected",
        appends=2,
        restarts=1,
        constants={"Forgetful": "TRUE"},
    ),
    _sibling(
        _F,
        "a new leader is unconfirmed",
        "AppendedWhereExpected",
        appends=3,
        elections=1,
        constants={"Forgetful": "TRUE"},
    ),
    _sibling(_F, "a confirmation ends in time", "AppendedWhereExpected", appends=3, expiries=1),
    _sibling(_F, "a lost acknowledgement proves nothing", "SuccessIsInTheLog", appends=2, connections=1),
    _sibling(_F, "a duplicate is read back", "SuccessIsInTheLog", appends=2),
    _sibling(_F, "batches carry an instance id", "NoTwoOwnARecord", appends=2, contents="xx", connections=1),
    _sibling(
        _F,
        "a batch belongs to one append",
        "NoTwoOwnARecord",
        appends=2,
        contents="xx",
        connections=2,
        retries=2,
        constants=_ONE,
    ),
    _sibling(_F, "equal records are no proof", "NoTwoOwnARecord", appends=2, contents="xx"),
    _sibling(
        _F, "only the log refuses", "RefusedIsNotInTheLog", appends=2, connections=1, constants={"Remembered": "1"}
    ),
    _sibling(_F, "the answer's offset is compared", "SuccessIsInTheLog", appends=2, bypasses=1),
    _sibling(
        _F,
        "a new base has a new epoch",
        "AnEpochHasOneBase",
        appends=4,
        bypasses=1,
        connections=1,
        constants={"MaxEpoch": "1", **_ONE},
        small=False,
    ),
    _sibling(_F, "the first base of an epoch counts", "AnEpochHasOneBase", appends=3, bypasses=1, constants=_BASES),
    _sibling(
        _F, "base counts once it is stored", "AnEpochHasOneBase", appends=3, bypasses=1, constants=_BASES, small=False
    ),
    _sibling(
        _F,
        "last epoch serves one append",
        "AnEpochHasOneBase",
        appends=3,
        bypasses=1,
        connections=1,
        constants={**_ROTATED, **_ONE},
    ),
    _sibling(_C, "a claim is a marker", "AppendedWhereExpected", appends=2),
    _sibling(_C, "no two claims have one epoch", "AppendedWhereExpected", appends=2),
    _sibling(_C, "the log end is read after the claim", "AppendedWhereExpected", appends=2),
    _sibling(
        _C,
        "a marker is replicated before the first append",
        "AppendedWhereExpected",
        appends=2,
        elections=1,
        constants={"MaxEpoch": "2"},
    ),
    _sibling(
        _C,
        "a marker is never sent again",
        "AppendedWhereExpected",
        appends=2,
        connections=1,
        constants={"MaxEpoch": "1"},
    ),
    _sibling(
        _C,
        "no pipeline while a lost append may be queued",
        "NothingFollowsARefusedAppend",
        appends=3,
        connections=1,
        constants={"MaxEpoch": "1"},
    ),
    _sibling(
        _C,
        "shared mode sends one append at a time",
        "NothingFollowsARefusedAppend",
        appends=3,
        constants={"MaxEpoch": "2"},
    ),
    _sibling(_C, "a claim ends in time", "AppendedWhereExpected", appends=2, expiries=1),
    _sibling(
        _C,
        "the last epochs of a producer id are shared",
        "AppendedWhereExpected",
        appends=2,
        constants={"EpochsPerId": "4", "MaxEpoch": "3", "SharedEpochs": "2"},
    ),
    _sibling(
        _C,
        "a last epoch begins once no marker can follow",
        "AppendedWhereExpected",
        appends=1,
        connections=1,
        constants={"EpochsPerId": "4", "MaxEpoch": "3", "SharedEpochs": "2"},
    ),
    _sibling(_T, "fenced and other appends are not in flight together", "AppendedWhereExpected"),
    _sibling(_T, "other appends wait for fenced ones that may be queued", "AppendedWhereExpected", connections=1),
    _sibling(_T, "conditional appends wait for others that may be queued", "AppendedWhereExpected", connections=1),
    _sibling(_T, "conditional appends wait during a takeover", "AppendedWhereExpected", kills=1, constants=_SUCCESSOR),
    _sibling(
        _T,
        "log end and sequence are read together",
        "AppendedWhereExpected",
        constants={**_SEVERAL, "Unconditional": "{}"},
    ),
    _sibling(
        _T,
        "the answer's offset is compared",
        "SuccessIsInTheLog",
        constants={**_SEVERAL, "Unconditional": "{3}"},
        only=("TypeOK", "SuccessIsInTheLog"),
    ),
)

#: What docs/contract.md excludes, by the words of its table.
LIMITS = (
    _model(
        _F,
        "producer.id.expiration.ms lowered too far",
        appends=2,
        expiries=1,
        without=("no request is queued until producers expire",),
        violates="AppendedWhereExpected",
    ),
    _model(
        _F,
        "a bypassing writer, and a leader that has forgotten the producer before a process has read the new base",
        appends=2,
        bypasses=1,
        restarts=1,
        constants={"MaxEpoch": "1", "Earlier": "1", "Forgetful": "TRUE"},
        without=("views are current when a producer is forgotten",),
        violates="AppendedWhereExpected",
    ),
    _model(
        _F,
        "a bypassing writer before the one append of a last epoch",
        appends=2,
        bypasses=1,
        connections=1,
        constants={**_ROTATED, **_ONE},
        without=("a last epoch is used before the log moves",),
        violates="AnEpochHasOneBase",
    ),
    _model(
        _F,
        "a bypassing writer while pipelined appends are in doubt",
        appends=4,
        bypasses=1,
        connections=1,
        constants={"MaxEpoch": "1", **_ONE},
        violates="RefusedIsNotInTheLog",
        small=False,
    ),
    _model(
        _F,
        "LogAppendTime, two equal batches without fencepost-write-id race",
        appends=2,
        contents="xx",
        constants={"LogAppendTime": "TRUE"},
        violates="NoTwoOwnARecord",
    ),
    _model(
        _F,
        "a process that starts learns of the others a moment late",
        appends=4,
        starts=1,
        constants={"Serving": "{p1}"},
        violates="NothingFollowsARefusedAppend",
        small=False,
    ),
    _model(_T, "several processes", constants={**_SEVERAL, "Unconditional": "{3}"}, violates="AppendedWhereExpected"),
    _model(
        _T,
        "a request delayed longer in a broker's queue",
        connections=1,
        without=("no request is queued for longer than queued_seconds",),
        violates="AppendedWhereExpected",
    ),
    _model(
        _T,
        "unconditional appends do not wait during a takeover",
        kills=1,
        constants=_SUCCESSOR,
        without=("other appends wait during a takeover",),
        violates="AppendedWhereExpected",
    ),
)

#: The bounds in which a sibling or limit fails, with the rule: its promise is not violated there.
WITH_RULES = tuple(
    replace(
        each,
        name=f"with the rule, where it fails {each.name}",
        constants={**each.constants, "Without": "{}"},
        promises=(each.violates,),
        violates=None,
        small=False,
    )
    for each in (*SIBLINGS, *LIMITS)
    if each.violates is not None and each.constants["Without"] != "{}" and "a bypassing writer" not in each.name
)

MODELS = (*DESIGNS, *SIBLINGS, *LIMITS, *WITH_RULES)
assert len({each.id for each in MODELS}) == len(MODELS)
