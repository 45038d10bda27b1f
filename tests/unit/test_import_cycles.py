"""No cycle among the modules that a module imports: at load time, within a function, or for types only."""

from __future__ import annotations

from collections.abc import Iterator

import grimp

PACKAGES = ("fencepost_policies", "fencepost_proxy", "fencepost_dev", "fencepost")


def _cycles(graph: grimp.ImportGraph) -> Iterator[frozenset[str]]:
    left = set(graph.modules)
    while left:
        module = left.pop()
        together = graph.find_downstream_modules(module) & graph.find_upstream_modules(module) | {module}
        left -= together
        if len(together) > 1:
            yield frozenset(together)


def test_cycles_are_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")):
        graph.add_import(importer=importer, imported=imported)
    assert list(_cycles(graph)) == [{"a", "b", "c"}]


def test_modules_import_each_other_in_no_cycle() -> None:
    found = _cycles(grimp.build_graph(*PACKAGES, cache_dir=None))
    assert not [sorted(cycle) for cycle in found], "move what both need into a module below them"
