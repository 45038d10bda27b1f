"""No cycle among the modules that a module imports: at load time, within a function, or for types only.

And each name that a test imports exists: some tests run rarely.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from types import ModuleType

import grimp

from tests.support.docs import ROOT

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


def test_names_that_tests_import_exist() -> None:
    missing = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGES):
                module = importlib.import_module(str(node.module))
                missing |= {
                    (path.name, module.__name__, each.name) for each in node.names if not _has(module, each.name)
                }
    assert not missing


def _has(module: ModuleType, name: str) -> bool:
    """As an attribute, or as a module of a package."""
    submodule = f"{module.__name__}.{name}"
    return hasattr(module, name) or (hasattr(module, "__path__") and importlib.util.find_spec(submodule) is not None)
