"""No module over 700 lines, no class over 400 lines or 25 methods, no function over 60 lines.

`LARGER` has what is larger, with its present size: it may shrink, not increase, and goes once it is within the limits.
`REASONS` says why each is not split.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("policies/fencepost_policies", "proxy/fencepost_proxy", "proxy/fencepost_dev", "client/fencepost")
MODULE_LINES_MAX, CLASS_LINES_MAX, METHODS_MAX, FUNCTION_LINES_MAX = 700, 400, 25, 60

#: By path and name: lines; for a class also its methods.
LARGER: dict[str, tuple[int, ...]] = {
    "proxy/fencepost_proxy/session/dispatcher.py:Dispatcher": (282, 34),
    "proxy/fencepost_proxy/wire/batch_scan.py:_search_headers()": (86,),
}
REASONS = {
    "Dispatcher": "one method for each call of a driver or a session; they share one queue of effects, in one order",
    "_search_headers()": "a loop over the bytes of each record: a call for each field would double its cost",
}


def _sizes(path: Path) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Name, size and limit of a module and of what is in it."""
    source = path.read_text()
    name = str(path.relative_to(ROOT))
    yield name, (source.count("\n"),), (MODULE_LINES_MAX,)
    yield from _inside(ast.parse(source), f"{name}:")


def _inside(parent: ast.AST, prefix: str) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
            yield f"{prefix}{node.name}", (_lines(node), methods), (CLASS_LINES_MAX, METHODS_MAX)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}()", (_lines(node),), (FUNCTION_LINES_MAX,)
        yield from _inside(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def _lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _exceeds(size: tuple[int, ...], limit: tuple[int, ...]) -> bool:
    return any(one > most for one, most in zip(size, limit, strict=True))


def test_nothing_is_larger_than_the_limits_or_than_it_was() -> None:
    found = {
        name: size
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for name, size, limit in _sizes(path)
        if _exceeds(size, limit)
    }
    grown = {name: size for name, size in found.items() if _exceeds(size, LARGER.get(name, (0,) * len(size)))}
    assert not grown, "split it, or find what it can do without"
    assert not LARGER.keys() - found.keys(), "within the limits now: remove the entry"
    assert {name.rpartition(":")[2] for name in LARGER} == REASONS.keys(), "give the reason"
