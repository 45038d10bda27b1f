"""`tests/pages/messages.md`: every text that the product prints, shows or sends, read from the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

from fencepost_proxy.config.keys import KEYS
from tests.pages.logs import is_logged
from tests.support.docs import ROOT

_SOURCES: Final = ("client", "policies", "proxy", "spark_jobs")

#: Kind → what it covers. The order of the page.
KINDS: Final = {
    "refusals": "`Refusal(...)`: error messages in Kafka responses",
    "exceptions": "`raise X(...)`, calls of exception classes, and of functions whose result is raised",
    "status and advice": "`Problem(...)`, other texts of `{hints,readiness,findings,status}.py`, `page.{html,js}`",
    "checks": "`Finding(...)`, and other texts of `checking.py`, `diagnosis.py`, `rights.py`",
    "command line": "`help`, `description`, `epilog`, `title`, `metavar`; other texts of `cli/`, `commands/`",
    "printed": "`print(...)`, `say(...)`, `.write(...)`, `progress(...)`, `.error(...)` of a parser, `SystemExit(...)`",
    "log events": "calls of `_log` and `_limited_log`",
    "metrics": "`Section(...)`, and the docstrings of metrics",
    "options and config keys": "config keys, `Option(...)`, texts of `config/{__init__,keys}.py`, `virtual_configs.py`",
    "API table": "texts of `wire/apis.py`",
    "other": "every other string of two words or more",
}
_CALLS: Final = {
    "Refusal": "refusals",
    "__init__": "exceptions",
    "Problem": "status and advice",
    "Finding": "checks",
    **dict.fromkeys(("print", "say", "write", "_progress", "progress", "exit", "error", "SystemExit"), "printed"),
    "Section": "metrics",
    "Option": "options and config keys",
}
_FILES: Final = {
    **dict.fromkeys(
        ("cluster/hints", "observability/readiness", "preflight/findings", "observability/status.py"),
        "status and advice",
    ),
    **dict.fromkeys(("preflight/checking", "observability/diagnosis", "preflight/rights"), "checks"),
    **dict.fromkeys(("config/__init__", "config/keys", "topics/virtual_configs"), "options and config keys"),
    "wire/apis": "API table",
    **dict.fromkeys(("cli/", "commands/"), "command line"),
}
_METRICS: Final = ("fencepost_", "process_")
_HELP: Final = ("help", "description", "epilog", "title", "metavar")
#: Calls whose texts are not shown: patterns, type names and binary formats.
_HIDDEN: Final = ("compile", "cast", "Struct", "TypeVar", "NewType", "dataclass", "get_context")

_HEAD: Final = """\
# Messages

Every text that Fencepost prints, shows or sends, for review and for searching. `…` stands for a value.

The page is generated from the sources: change a text there, then run `python -m tests.pages`.

| kind | covers | texts |
|---|---|---|
"""


class Text(NamedTuple):
    kind: str
    source: str
    text: str


def page() -> str:
    found = sorted(set(texts()), key=lambda each: (list(KINDS).index(each.kind), each))
    kinds = {kind: list(of_kind) for kind, of_kind in groupby(found, lambda each: each.kind)}
    rows = [f"| {kind} | {covers} | {len(kinds[kind])} |\n" for kind, covers in KINDS.items()]
    return _HEAD + "".join((*rows, *(_section(kind, of_kind) for kind, of_kind in kinds.items())))


def _section(kind: str, found: Iterable[Text]) -> str:
    lines = [f"\n## {kind[0].upper()}{kind[1:]}\n\n````text\n"]
    for source, of_source in groupby(found, lambda each: each.source):
        lines.append(f"{source}\n")
        lines += [
            f"    {line}".rstrip() + "\n" for each in of_source for line in each.text.splitlines() if line.strip()
        ]
    return "".join((*lines, "````\n"))


def texts() -> Iterator[Text]:
    paths = [path for name in _SOURCES for path in (ROOT / name).rglob("*.py")]
    files = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}
    raised = {name for source in files.values() for node in ast.walk(ast.parse(source)) for name in _raised(node)}
    for file, source in files.items():
        yield from texts_in(source, file, raised)
    for key in KEYS.values():
        yield Text("options and config keys", f"proxy/fencepost_proxy/config/__init__.py:{key.name}", key.doc)
    yield from _page_texts()


def _page_texts() -> Iterator[Text]:
    """Texts of the status page: string literals and titles of columns in its script, and what its HTML shows."""
    folder = "proxy/fencepost_proxy/observability"
    script, markup = ((ROOT / folder / f"page.{kind}").read_text("utf-8") for kind in ("js", "html"))
    code = re.sub(r"^ *//.*|; //.*", "", script, flags=re.MULTILINE)
    literals = [re.sub(r"\$\{[^}]*\}", "…", "".join(each)) for each in re.findall(r'"([^"\n]*)"|`([^`\n]*)`', code)]
    for name, found in (("js", literals), ("html", re.sub(r"<[^>]*>", "\n", markup).splitlines())):
        for text in found:
            if _is_shown(text, certain=name == "html"):
                yield Text("status and advice", f"{folder}/page.{name}:", text.strip())


def texts_in(source: str, file: str, raised: set[str]) -> Iterator[Text]:
    """`raised` – names of exception classes, and of functions whose result is raised."""
    yield from _Module(file, ast.parse(source), raised).texts()


def _raised(node: ast.AST) -> Iterator[str]:
    """Names of functions whose result is raised, and of exception classes."""
    match node:
        case ast.Raise(exc=ast.Call(func=function)):
            yield _name(function)
        case ast.ClassDef(name=name, bases=[*_, base]) if _name(base).endswith(("Error", "Exception")):
            yield name


class _Module:
    def __init__(self, path: str, tree: ast.Module, raised: set[str]) -> None:
        self._path = path
        self._tree = tree
        self._raised = raised
        self._kind = next((kind for part, kind in _FILES.items() if f"/{part}" in self._path), "other")

    def texts(self) -> Iterator[Text]:
        yield from self._below(self._tree, self._kind, "")
        described = any(isinstance(node, ast.Name) and node.id == "__doc__" for node in ast.walk(self._tree))
        if described and (text := ast.get_docstring(self._tree)):
            yield Text("command line", f"{self._path}:", text)

    def _below(self, node: ast.AST, kind: str, scope: str) -> Iterator[Text]:
        for child in ast.iter_child_nodes(node):
            yield from self._at(child, kind, scope)

    def _at(self, node: ast.AST, kind: str, scope: str) -> Iterator[Text]:
        text = _text(node)
        if text is not None:
            if _is_shown(text, certain=kind not in ("other", self._kind)):
                yield Text(kind, f"{self._path}:{scope}", _printable(text))
            # Texts of more than one word inside its values have the same kind.
            for value in _values(node):
                yield from self._at(value, kind if kind == self._kind else "other", scope)
            return
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                if scope.startswith(_METRICS):
                    yield Text("metrics", f"{self._path}:{scope}", " ".join(text.split()))
                return  # another docstring
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                scope = f"{scope}.{name}".strip(".")
            case ast.Raise():
                kind = "exceptions"
            case ast.Call(func=function) if _name(function) in _HIDDEN:
                return
            case ast.Call(func=function):
                kind = self._kind_of(node, _name(function)) or kind
            case ast.keyword(arg=str(name)) if name in _HELP:
                kind = "command line"
            case ast.Subscript(value=value):
                yield from self._at(value, kind, scope)
                return
        yield from self._below(node, kind, scope)

    def _kind_of(self, call: ast.Call, name: str) -> str | None:
        if is_logged(call):
            return "log events"
        return _CALLS.get(name) or ("exceptions" if name in self._raised else None)


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() or each == "\n" else "…" for each in text).strip()


def _name(function: ast.expr) -> str:
    match function:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _text(node: ast.AST) -> str | None:
    """The text, with … for values; None if it is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = _text(left), _text(right)
            return None if both == (None, None) else "".join("…" if each is None else each for each in both)
    return None


def _values(node: ast.AST) -> Iterator[ast.AST]:
    """The parts that `_text` shows as …."""
    match node:
        case ast.JoinedStr(values=parts):
            yield from (part.value for part in parts if isinstance(part, ast.FormattedValue))
        case ast.BinOp(left=left, right=right):
            for each in (left, right):
                yield from [each] if _text(each) is None else _values(each)


def _is_shown(text: str, *, certain: bool) -> bool:
    """`certain` – the call makes it a text; otherwise it needs two words."""
    return bool(re.search(r"[A-Za-z]{2}" if certain else r"[A-Za-z…][,.:;)]? +\S*[A-Za-z]", text))
