"""Source in, source out: what is good to read, made into what mypyc compiles well. Every line keeps its number.

- A class with `@value` or `@dataclass(slots=True)` becomes a plain one with an `__init__`, an `__eq__` and
  `__match_args__` of its own. mypyc leaves classes with a decorator that it does not know in the interpreter, and
  `__init__` of those that it knows: a request makes a dozen of them.
- A constant, by its name, becomes `Final`: compiled code reads it without a look into the module's dictionary.
- `replace` is one that also takes such classes.
- A class that says `# extended in tests` may be extended by classes that are not compiled.

What mypyc would compile into something else is refused: a name has one type in a function, so an error's name may not
be that of another error, or of anything else there.
"""

from __future__ import annotations

import ast
import re
from typing import Final

_CONSTANT: Final = re.compile(r"(_?[A-Z][A-Z0-9_]*) = (?!TypeVar)")
_HEAD: Final = "from __future__ import annotations"
_EXTENDED: Final = "  # extended in tests"
_DATACLASSES: Final = "from dataclasses import "


class NativeError(Exception):
    """A source is written as this module does not know it; the text says where and how."""


def native(text: str) -> str:
    """Raises NativeError."""
    lines = text.split("\n")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            _refuse_shared_names(node)
    values = [value for node in tree.body if isinstance(node, ast.ClassDef) and (value := _value(node, lines))]
    for number, line in enumerate(lines):
        if constant := _CONSTANT.match(line):
            lines[number] = f"{constant[1]}: Final = {line[constant.end() :]}"
        elif line.startswith(_DATACLASSES):
            lines[number] = _without_replace(line)
        elif line.endswith(_EXTENDED):
            lines[number - 1] = "@_mypyc_attr(allow_interpreted_subclasses=True)"
    if _HEAD not in lines:
        raise NativeError(f"{_HEAD!r} is not in it")
    head = lines.index(_HEAD)
    lines[head] += "; from typing import TYPE_CHECKING, Final; from fencepost_compiled.values import as_value"
    # Not there at run time, and not needed.
    lines[head + 1] = "if TYPE_CHECKING: from mypy_extensions import mypyc_attr as _mypyc_attr"
    return "\n".join([*lines, *values, ""])


def _refuse_shared_names(function: ast.FunctionDef) -> None:
    errors: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.ExceptHandler) and node.name is not None and node.type is not None:
            kind = ast.unparse(node.type)
            if errors.setdefault(node.name, kind) != kind:
                raise NativeError(f"{function.name}: {node.name} is one kind of error here and another there")
    for node in ast.walk(function):
        taken = node.name if isinstance(node, ast.MatchAs | ast.MatchStar) else None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            taken = node.id
        if isinstance(node, ast.arg):
            taken = node.arg
        if taken in errors:
            raise NativeError(f"{function.name}: {taken} is an error here and something else there")


def _without_replace(line: str) -> str:
    names = line.removeprefix(_DATACLASSES).split(", ")
    if "replace" not in names:
        return line
    rest = ", ".join(name for name in names if name != "replace")
    return "from fencepost_compiled.values import replace" + (f"; {_DATACLASSES}{rest}" if rest else "")


def _value(node: ast.ClassDef, lines: list[str]) -> str | None:
    """Rewrites the class where it is one of ours; the call that goes to the end of the module then."""
    equal = _equality(node)
    if equal is None:
        return None
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    names, compared, parameters, assignments = [], [], [], []
    for each in fields:
        if not isinstance(each.target, ast.Name):
            raise NativeError(f"{node.name}: a field is no name")
        name, kind = each.target.id, ast.unparse(each.annotation)
        names.append(name)
        options = _options(each.value)
        if options.get("compare", "True") == "True":
            compared.append(name)
        if "default_factory" in options:
            parameters.append(f"{name}: {kind} | None = None")
            assignments.append(f"self.{name}: {kind} = {options['default_factory']}() if {name} is None else {name}")
        else:
            parameters.append(f"{name}: {kind}" + (f" = {options['default']}" if "default" in options else ""))
            assignments.append(f"self.{name} = {name}")
    made = []
    if names:
        made.append(f"    __match_args__: Final = {tuple(names)!r}")
        made.append(f"    def __init__(self, {', '.join(parameters)}) -> None: {'; '.join(assignments)}")
    if equal:
        same = [f"isinstance(other, {node.name})", *(f"self.{name} == other.{name}" for name in compared)]
        made.append(f"    def __eq__(self, other: object) -> bool: return {' and '.join(same)}")
    decorator = node.decorator_list[0]
    for number in range(decorator.lineno - 1, decorator.end_lineno or decorator.lineno):
        lines[number] = ""
    room = _room(node, fields, lines)
    if len(room) < len(made):
        raise NativeError(f"{node.name}: no room for what it becomes; leave blank lines behind its fields")
    for number in room:
        lines[number] = ""
    for number, line in zip(room, made, strict=False):
        lines[number] = line
    return f"as_value({node.name}, {tuple(names)!r})"


def _equality(node: ast.ClassDef) -> bool | None:
    """Whether a class of values compares by its fields; None for any other class."""
    match node.decorator_list:
        case [ast.Name("value")]:
            return True
        case [ast.Call(ast.Name("dataclass"), [], keywords)]:
            options = {each.arg: ast.unparse(each.value) for each in keywords}
            if options.pop("slots", "") != "True" or options.keys() - {"eq"}:
                raise NativeError(f"{node.name}: @dataclass with other options than slots=True and eq=False")
            return options.get("eq") != "False"
    return None


def _options(default: ast.expr | None) -> dict[str, str]:
    match default:
        case None:
            return {}
        case ast.Call(ast.Name("field"), [], keywords):
            return {str(each.arg): ast.unparse(each.value) for each in keywords}
        case _:
            return {"default": ast.unparse(default)}


def _room(node: ast.ClassDef, fields: list[ast.AnnAssign], lines: list[str]) -> list[int]:
    """Lines of the fields, and blank ones behind: where the class says something else from now on."""
    room = [number for each in fields for number in range(each.lineno - 1, each.end_lineno or each.lineno)]
    last = fields[-1] if fields else node.body[0]
    if isinstance(last, ast.Pass):
        room.append(last.lineno - 1)
    number = last.end_lineno or last.lineno
    while number < len(lines) and not lines[number].strip():
        room.append(number)
        number += 1
    return room
