"""Concurrent test processes (`make test`, pytest-xdist): which tests share a process, and which start first.

The tests of an integration file share a process, because they share clusters and proxies of its fixtures. Simulations
and the comparisons of the fast path share nothing, so any idle process takes them. One process starts at the other end
of the list: it is busy while the others wait for their Kafkas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest
    from xdist.workermanage import WorkerController

#: The slowest files first, as measured, so that none runs alone at the end; then all others, and last the tests that
#: can be distributed one by one.
LONGEST = (
    "test_spark",
    "test_spark_sink",
    "test_conformance",
    "test_soak",
    "test_races",
    "test_partition_expansion",
    "test_order_proof",
    "test_embedded_kafka",
    "test_groups",
    "test_client_retries",
    "test_leader_changes",
    "test_client_library",
    "test_client_outcomes",
    "test_restarts",
    "test_in_doubt",
    "test_bad_input",
    "test_state_topic",
    "test_equivalence",
    "test_java_tools",
    "test_demo",
    "test_several_proxies",
    "test_producer_state",
    "test_contract",
    "test_checked_transactions",
)
#: Tests that are distributed one by one.
_ALONE = ("tests/simulation/", "tests/unit/test_fast_path.py")


class ByFile(LoadScopeScheduling):
    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # the number of a file's tests does not determine its duration
        super().__init__(config, log)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.numnodes > 2 and node.gateway.id == f"gw{self.numnodes - 1}":
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(_ALONE) else nodeid.split("::", 1)[0]


def longest_first(item: pytest.Item) -> tuple[bool, int]:
    """The sort key; files and tests keep their order otherwise."""
    name = item.path.stem
    return item.nodeid.startswith(_ALONE), LONGEST.index(name) if name in LONGEST else len(LONGEST)
