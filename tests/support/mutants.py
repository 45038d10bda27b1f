"""Mutants: defects of the code under test, applied by name and by AST node.

A mutant that no longer applies is an error. The error names the mutant, the function, and the node that is missing.
"""

from __future__ import annotations
import __future__

import ast
import difflib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.support.executors import PYTHON, executing

_SHOWN_CHARS = 100

#: What has an attribute (a class or module), its name, and the defective value.
Change = Callable[[], tuple[Any, str, Any]]


class MutantDoesNotApply(Exception):
    """The code under test has changed."""


class Mutant:
    """`breaks`: the defect. `rule`: the rule that it violates. `where`: the scenarios that should detect it."""

    def __init__(self, name: str, breaks: str, where: tuple[str, ...], *changes: Change, rule: str = "") -> None:
        self.name = name
        self.breaks = breaks
        self.where = where
        self.rule = rule
        self.changes = changes

    @contextmanager
    def live(self) -> Iterator[None]:
        """Python alone executes meanwhile: native code would hide defects of Python."""
        with executing(PYTHON), ExitStack() as undo:
            for change in self.changes:
                try:
                    holder, name, value = change()
                except MutantDoesNotApply as error:
                    raise MutantDoesNotApply(f"mutant {self.name}: {error}") from None
                undo.callback(setattr, holder, name, vars(holder)[name])
                setattr(holder, name, value)
            yield


def put(target: Any, path: str, value: Any) -> Change:
    """Replace an attribute of a class or module. `path`: its name, or that of a class in the module and its name."""
    return lambda: (*_find(target, path)[:2], value)


def wrap(target: Any, path: str, around: Callable[..., Any]) -> Change:
    """Replace a function by `around`, which gets the original as its first argument."""

    def change() -> tuple[Any, str, Any]:
        holder, name, original = _find(target, path)
        return holder, name, lambda *args, **more: around(original, *args, **more)

    return change


def body(target: Any, path: str, statements: str) -> Change:
    """Replace the body of a function, which keeps its signature and decorators."""

    def change() -> tuple[Any, str, Any]:
        holder, name, original = _find(target, path)
        function, tree = _parsed(original)
        tree.body = ast.parse(statements).body
        return holder, name, _compiled(function, tree)

    return change


def edit(target: Any, path: str, *nodes: tuple[str, str]) -> Change:
    """Replace nodes of a function. Each pair is two expressions, or two sequences of statements.

    The first of a pair must occur exactly once. Formatting is irrelevant.
    """

    def change() -> tuple[Any, str, Any]:
        holder, name, original = _find(target, path)
        function, tree = _parsed(original)
        for old, new in nodes:
            _replace(tree, old, new, f"{function.__module__}.{function.__qualname__}")
        return holder, name, _compiled(function, tree)

    return change


def _find(target: Any, path: str) -> tuple[Any, str, Any]:
    """The class that defines the attribute, or the module; the attribute's name and value."""
    for name in path.split("."):
        holders = target.__mro__ if isinstance(target, type) else (target,)
        holder = next((each for each in holders if name in vars(each)), None)
        if holder is None:
            raise MutantDoesNotApply(f"{target.__name__} has no attribute {name}{_similar(name, dir(target))}")
        target = vars(holder)[name]
    return holder, name, target


def _parsed(original: Any) -> tuple[Any, ast.FunctionDef]:
    function = original.fget if isinstance(original, property) else getattr(original, "__func__", original)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    return function, tree


def _compiled(function: Any, tree: ast.FunctionDef) -> Any:
    module = ast.fix_missing_locations(ast.Module([tree], []))
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    scope: dict[str, Any] = {}
    exec(compile(module, f"<{tree.name} with a defect>", "exec", flags, dont_inherit=True), function.__globals__, scope)
    return scope[tree.name]


def _replace(tree: ast.FunctionDef, old: str, new: str, where: str) -> None:
    olds, news = ast.parse(old).body, ast.parse(new).body
    if all(len(nodes) == 1 and isinstance(nodes[0], ast.Expr) for nodes in (olds, news)):
        olds, news = ([nodes[0].value] for nodes in (olds, news))  # type: ignore[attr-defined]
    sought = [ast.dump(node) for node in olds]
    lists = list(_children(tree))
    found = [
        (siblings, at, replace)
        for siblings, replace in lists
        for at in range(len(siblings) - len(sought) + 1)
        if [ast.dump(node) for node in siblings[at : at + len(sought)]] == sought
    ]
    if len(found) != 1:
        kind = ast.stmt if isinstance(olds[0], ast.stmt) else ast.expr
        others = [ast.unparse(node) for siblings, _ in lists for node in siblings if isinstance(node, kind)]
        problem = f"has {len(found) or 'no'} node{'s' if found else ''} `{old}`"
        raise MutantDoesNotApply(f"{where} {problem}{'' if found else _similar(ast.unparse(olds[0]), others)}")
    siblings, at, replace = found[0]
    replace([*siblings[:at], *news, *siblings[at + len(sought) :]])


def _children(tree: ast.AST) -> Iterator[tuple[list[ast.AST], Callable[[list[Any]], None]]]:
    """Each list of sibling nodes, and how to replace it. A single child is a list of one."""
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if isinstance(value, list) and all(isinstance(each, ast.AST) for each in value):
                yield value, lambda nodes, node=node, field=field: setattr(node, field, nodes)  # type: ignore[misc]
            elif isinstance(value, ast.AST):
                yield [value], lambda nodes, node=node, field=field: setattr(node, field, nodes[0])  # type: ignore[misc]


def _similar(sought: str, names: list[str]) -> str:
    near = difflib.get_close_matches(sought, sorted(set(names)), n=2, cutoff=0.3)
    return "; similar: " + ", ".join(f"`{each[:_SHOWN_CHARS]}`" for each in near) if near else ""
