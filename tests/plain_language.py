"""Words that this repository does not use: `python -m tests.plain_language [PATH]` lists where they are.

An identifier, a code span or a string without blanks counts once in each file, a word in prose each time.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: Generated from the sources, which contain all its texts; and Kafka's own names.
NOT_CHECKED = (
    ROOT / "tests" / "pages" / "messages.md",
    ROOT / "proxy" / "fencepost_proxy" / "wire" / "schemas.json",
    ROOT / "tests" / "plain_language.py",
    ROOT / "tests" / "unit" / "test_plain_language.py",
)
CHECKED = (
    "native",
    "proxy",
    "policies",
    "client",
    "spark_jobs",
    "examples",
    "benchmarks",
    "release",
    "README.md",
    "CHANGELOG.md",
    "docs",
    "deploy",
    "tests",
    "specification",
)
_IGNORED = frozenset(("__pycache__", "target"))
SUFFIXES = frozenset(
    (
        ".py",
        ".pyi",
        ".tla",
        ".rs",
        ".md",
        ".js",
        ".css",
        ".toml",
        ".yml",
        ".yaml",
        ".json",
        ".sh",
        ".service",
        ".kafka",
        ".spark",
        "",
    )
)

_SPARK = r"spark"
_NAMES, _PROSE = "names", "prose"
_A = "{a,an,the,one,its,each,every,another,this,that,last,first,next} "
_PEOPLE = (
    "administrators?|anyone|consumers|developers?|engineers?|operators?|people|person|producers|readers?|those|users?"
)


class Retired(NamedTuple):
    """`phrases` – comma-separated; `{a,b} c` is `a c, b c`. `use` – what to write instead. `allowed` – a regular
    expression: a phrase inside a match is no finding; identifiers are matched as written and as words. `only` – in
    identifiers or in prose alone. `files` – only in paths that match."""

    phrases: str
    use: str
    allowed: str = ""
    only: str = ""
    files: str = ""


#: Names of Kafka, Python and other projects stay: `allowed` matches them.
VOCABULARY = (
    Retired("room, rooms", "package, layer, module; `logger` in logs", "room for"),
    Retired("house, door plan", "codebase, package layout"),
    Retired("wall, walls", "boundary", "wall[- ]clock|firewall"),
    Retired("gate, gates", "partition sequencer"),
    Retired("ticket, tickets, bid, bids", "pending append, submit", "(session|service) tickets?"),
    Retired("offer, offers, offered", "pending append, submit", files=r"\.py$|ARCHITECTURE|decisions|mutants"),
    Retired("turn, turns", "produce request in progress", r"turns? (it )?(on|off|into|out|to)\b|in turn"),
    Retired(
        "grant, grants, granted",
        "admit",
        r"\b(acls?|operations?|permissions?|access|rights?|alter|grants? \w+ on|for granted)\b",
    ),
    Retired("withdraw, withdraws, withdrawn, withdrawal", "cancel"),
    Retired("own", "append mode: SEQUENCED", "^(?!own$).*", only=_NAMES),
    Retired("own conditional, own-conditional", "append mode: TRANSACTIONAL_CONDITIONAL"),
    Retired(
        "plain",
        "append mode: PASS_THROUGH",
        r"PLAIN|sasl_plain|plain\.PlainLoginModule|plain[- ]text|text/plain|plain\.sasl|OAUTHBEARER",
        only=_NAMES,
    ),
    Retired("plain {append,appends,batch,batches,produce,topic,topics}", "append mode: PASS_THROUGH", only=_PROSE),
    Retired("stamp, stamps, stamped, stamping, unstamped", "fence, fenced append", "time stamp"),
    Retired("shift, shifts, shifted", "sequence offset", "(left|right)[- ]shift|_INSTANCE_ID_SHIFT"),
    Retired(
        "tag, tags",
        "instance id; fence tag",
        r"tagged|commit[- _]tags?|(read|write|split|join|take|skip|header)_tags"
        r"|(image|docker|git|html|release|platform) tags?"
        r"|LEVEL_TAG|TAGS_MAX|PARTITION_COUNT_TAG|field_tag|_tags_before|^tags$"
        r'|--tag|"tags"|class=.tag|\.tag\b|^newTag$',
        files=r"^(?!.*(wire/|docker))",
    ),
    Retired("warm", "fence confirmed", r"warm[- ]?up"),
    Retired("cold", "fence unconfirmed", "cold (start|cache)"),
    Retired("doubt, doubts, doubted, doubtful", "in-doubt append", "in[- ]doubt"),
    Retired("settle, settles, settled, settling, settler", "resolve, resolver; post-expansion grace period"),
    Retired(
        "look, looks, looked, looking", "read, probe, snapshot", "looks? (like|up)|looked up|looking up", only=_NAMES
    ),
    Retired(_A + "look, looks at, looked at, looks into, looked into", "read, probe, snapshot", only=_PROSE),
    Retired("sight, sights, seen", "observed"),
    Retired("tail, tails", "log-end snapshot", "tail -|tail latency|latency tail|unconsumed_tail"),
    Retired("landed, lands", "appended"),
    Retired(
        "follower, followers",
        "duplicate waiter",
        "(leaders?|replicas?|isr|fetch|kip-392|broker)[^.]*followers?|followers?[^.]*(leader|replica|fetch|broker|behind)",
    ),
    Retired("heir, heirs", "duplicate waiter"),
    Retired(
        "chain, chains, chained",
        "pipelined appends, failed pipeline",
        "(certificate|cert|ca|trust) chains?|chain of (certificates|trust)",
    ),
    Retired("hole, holes", "sequence gap"),
    Retired("sent behind a failed batch", "PREDECESSOR_FAILED"),
    Retired("door, doors", "append barrier"),
    Retired("inside", "enter, entered", only=_NAMES),
    Retired("{go,goes,went,going} in, {go,goes,went,going} inside", "enter", "franz-go in", only=_PROSE),
    Retired("counted", "with partition-count checks", only=_NAMES),
    Retired("counted {topic,topics,partition,partitions}", "topic with partition-count checks", only=_PROSE),
    Retired(
        "grow, grows, growing, grew, grown, growth, growths",
        "expand, expanded, expansion",
        r"(memory|heap|disk|file|log|buffer|queue)s? (grow\w*|grew)|growth of (memory|the heap|the log)",
    ),
    Retired("born, unborn", "created by an expansion"),
    Retired("prior, priors", "prior partition", "prior[- _]partitions?|prior to"),
    Retired("withheld, withhold, withholds, withholding, waited out", "gated (assignment), timed out"),
    Retired(
        "desk, desks, keeper, keepers, stake, stakes",
        "assignment filter, group progress tracker, expansion view",
        "zoo ?keeper",
    ),
    Retired("poison, poisons, poisoned, poisoning, unpoisoned", "abort-only transaction"),
    Retired("lift, lifts, lifted, lifting", "clear"),
    Retired("note, notes, noted", "record", "release notes|note_|add_note", only=_NAMES),
    Retired("judge, judges, judged, judging, judgment, verdict, verdicts", "commit validator, decision"),
    Retired("held", "paused, buffered, blocked, assigned", "locks? (is )?held|held lock"),
    Retired("surroundings", "services"),
    Retired("around", "services", only=_NAMES),
    Retired("passes", "relayed versions", only=_NAMES),
    Retired("treatment, treatments", "handling"),
    Retired(
        "slot, slots",
        "pending response",
        "__slots__|--slot|slots ?=|(task|executor|hash|replication) slots?|^slots$",
        files=r"^(?!examples/sources/postgres|tests/soak/postgres_load)",  # a term of PostgreSQL
    ),
    Retired("exchange, exchanges", "request rewriter, handler", "produce ?exchange|token exchange"),
    Retired("short way, shortcut, shortcuts", "fast path"),
    Retired("switch, switches", "dispatcher", "switch(es)? (on|off)", only=_NAMES),
    Retired("{a,the,its,each} switch", "dispatcher", only=_PROSE),
    Retired(
        "link, links",
        "proxied connection",
        "sym ?link|un ?link|hard ?link|readlink|find_links|ServiceLinks",
        only=_NAMES,
    ),
    Retired("{the,each,every,its,this,that} link", "proxied connection", only=_PROSE, files=r"\.py$"),
    Retired("side", "socket", "(server|client|left|right).side", only=_NAMES, files="proxy/"),
    Retired("lane, lanes", "pooled connection"),
    Retired(
        "owner, owners",
        "process",
        "owner.?references?|file owner|principal|owner.?group|token.owner.mismatch|--owner|chown|renewers?",
    ),
    Retired("{hand,hands,handed,handing} over, {give,gives,given,gave} away, handover", "migrate"),
    Retired("{sign,signs} of life", "heartbeat"),
    Retired("alive, gone", "live, dead", "keep[- _]?alive|is_alive|alive_?interval"),
    Retired("place, places", "process identity, partition", "place ?holders?|in place", only=_NAMES),
    Retired("told, tell, tells, telling, untold", "respond, report"),
    Retired("said, hear, hears, heard, unheard", "reported, observed"),
    Retired(
        "ask, asks, asked, asking, want, wants, wanted",
        "query, request",
        f"({_PEOPLE}|you) wants?|^WantedBy$|Wants=network",
    ),
    Retired("question, questions", "query, request"),
    Retired("stranger, strangers", "unauthorized client"),
    Retired("nobody, somebody, whoever", "no client, an operator, any client that"),
    Retired("who", "name the subject: the client, the operator", f"({_PEOPLE}) who\\b"),
    Retired("hasten, hastens, hastened", "force"),
    Retired(
        "go, leaving",
        "close, drain",
        r"leaving ?group|go(lang| client| run| mod|/cases)|main\.go|(kafka-|franz-|examples.|fencepost.|let )go",
        only=_NAMES,
    ),
    Retired("well", "healthy", "as well|well[- ]known", only=_NAMES),
    Retired("{is,are,all,not,be} well", "healthy", "well[- ]known", only=_PROSE),
    Retired("trouble, troubles, attention", "degraded, warning", "pay attention|troubleshoot\\w*"),
    Retired("guarded, unguarded", "checked topic", "Guarded ?Process"),
    Retired("carrier, carriers", "source of the expected offset"),
    Retired(
        "mark, marks, sift, sifts, sifted, starved",
        "commit tag, dedupe, contention-limited",
        "^pytest|mark as|marks? (it|them) as",
        files=_SPARK,
    ),
    Retired(
        "chunk, chunks, region, regions",
        "append, scan range",
        "chunked|combine_chunks|num_chunks|iterchunks",
        files=_SPARK,
    ),
    Retired("anew, once more", "again", only=_PROSE),
    Retired("beside", "alongside, next to", only=_PROSE),
    Retired(
        "behind",
        "after",
        r"behind (an?|the|one|its|several)[\w\s-]{0,30}?(balancer|prox(y|ies)|NAT|firewall|ingress|listener|service)"
        r"|f[ae]ll(s|en|ing)? behind|behind (NAT|by)",
    ),
    Retired("of its own", "its", only=_PROSE),
    Retired("all the same, come what may, for ever, so soon, therein", "still, always, indefinitely", only=_PROSE),
    Retired("by itself, as it is", "automatically, unchanged", only=_PROSE),
)


class Left(NamedTuple):
    """Phrases still used in paths that match `files`, since their removal renames much. `only` – as in `Retired`."""

    files: str
    phrases: str
    only: str = ""


LEFT = (
    # Git's tags, and those of wheels' names.
    Left(r"^release/|^tests/unit/test_release", "tag, tags"),
    Left(r"^specification/", "tail"),
    Left(r"^tests/native_mutants/|^tests/unit/test_(fast_path|native_mutants)", "for ever, gone, looked at"),
    Left(r"^tests/simulation/scenarios", "asking, chain, notes, stranger"),
    Left(r"^tests/unit/test_cli_completion", "shift"),
    Left(r"^tests/unit/test_partition_counts", "seen"),
    Left(
        r"^tests/",
        "around, asked, asking, behind, chain, chained, chunk, counted, follower, followers, gates, go, gone, growing, "
        "grown, held, inside, link, links, look, mark, nobody, note, noted, own, owner, passes, place, places, plain, "
        "said, seen, shift, stranger, tag, tags, tail, turns, verdict, warm, well, who",
        only=_NAMES,
    ),
)


class Finding(NamedTuple):
    """`left` – one that stays for now."""

    phrase: str
    file: str
    line: int
    text: str
    use: str
    left: bool = False

    def __str__(self) -> str:
        return f"{self.phrase} → {self.use}: {self.file}:{self.line}: {self.text}"


class _Phrase(NamedTuple):
    words: tuple[str, ...]
    row: Retired
    allowed: re.Pattern[str] | None
    files: re.Pattern[str]


def phrases() -> dict[str, list[_Phrase]]:
    """Phrases by their first words."""
    found: dict[str, list[_Phrase]] = {}
    for row in VOCABULARY:
        allowed = (
            re.compile(row.allowed, re.ASCII if "PLAIN" in row.allowed else re.IGNORECASE) if row.allowed else None
        )
        for pattern in re.split(r", (?![^{]*\})", row.phrases):
            parts = [part.strip("{}").split(",") for part in re.findall(r"\{[^}]*\}|[^{}]+", pattern)]
            for choice in itertools.product(*parts):
                words = tuple(re.findall(r"[\w]+", "".join(choice)))
                found.setdefault(words[0], []).append(_Phrase(words, row, allowed, re.compile(row.files)))
    return found


PHRASES = phrases()
_WORD = re.compile(r"[A-Za-z0-9]+")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
#: Parts of prose that are names: code spans, and words with an underscore, a dot or a capital inside.
_SPAN = re.compile(r"`[^`\n]+`|\]\([^)\s]*\)|https?://\S+|\b\w*(?:_|[a-z][A-Z])\w*\b|\b\w+(?:\.\w+)+\b")
#: Consecutive comment lines are one text.
_RUST = re.compile(
    r"(?P<comment>//[^\n]*(?:\n\s*//[^\n]*)*)|\"(?P<string>(?:\\.|[^\"\\])*)\""
    r"|(?P<character>b?'(?:\\[^']+|[^\\'])')|(?P<name>[A-Za-z_]\w*)",
    re.DOTALL,
)
_BETWEEN = re.compile(r"[\s#>*-]+")


@cache
def _in_name(name: str, file: str) -> list[_Phrase]:
    words = [word.lower() for word in _WORD.findall(_CAMEL.sub(" ", name))]
    spaced = " ".join(words)
    return [
        phrase
        for at, word in enumerate(words)
        for phrase in PHRASES.get(word, ())
        if phrase.row.only != _PROSE
        and tuple(words[at : at + len(phrase.words)]) == phrase.words
        and phrase.files.search(file)
        and not (phrase.allowed and (phrase.allowed.search(name) or phrase.allowed.search(spaced)))
    ]


def _in_prose(text: str, file: str) -> Iterator[tuple[int, _Phrase]]:
    """Offsets and phrases."""
    words = [(each.group().lower(), each.start(), each.end()) for each in _WORD.finditer(text)]
    for at, (word, start, _) in enumerate(words):
        for phrase in PHRASES.get(word, ()):
            found = words[at : at + len(phrase.words)]
            if (
                phrase.row.only != _NAMES
                and tuple(each[0] for each in found) == phrase.words
                and all(_BETWEEN.fullmatch(text, a[2], b[1]) for a, b in itertools.pairwise(found))
                and phrase.files.search(file)
                and not _is_allowed(phrase, text, start, found[-1][2])
            ):
                yield start, phrase
                break


def _is_allowed(phrase: _Phrase, text: str, start: int, end: int) -> bool:
    window = (max(0, start - 80), min(len(text), end + 80))
    return phrase.allowed is not None and any(
        each.start() <= start and end <= each.end() for each in phrase.allowed.finditer(text, *window)
    )


def findings_in(text: str, file: str) -> list[Finding]:
    """Findings in the contents of one file, whose name determines how it is parsed."""
    names: dict[str, int] = {}
    prose: list[tuple[int, str]] = []
    parse = _PARSERS.get(Path(file).suffix, _text)
    for line, piece, is_name in parse(text):
        if is_name:
            names.setdefault(piece, line)
            continue
        for span in _SPAN.finditer(piece):
            names.setdefault(span.group().strip("`"), line + piece.count("\n", 0, span.start()))
        prose.append((line, _SPAN.sub(lambda span: "\0" * len(span.group()), piece)))
    found = [
        Finding(" ".join(each.words), file, line, name, each.row.use, _is_left(each, file, _NAMES))
        for name, line in [(Path(file).stem, 1), *names.items()]
        for each in _in_name(name, file)
    ]
    for line, piece in prose:
        for offset, each in _in_prose(piece, file):
            start, end = max(0, offset - 40), offset + 50
            shown = " ".join(piece[start:end].replace("\0", "_").split())
            at = line + piece.count("\n", 0, offset)
            left = _is_left(each, file, _PROSE)
            found.append(Finding(" ".join(each.words), file, at, shown, each.row.use, left))
    return found


def _is_left(phrase: _Phrase, file: str, kind: str) -> bool:
    return any(
        re.search(row.files, file) and row.only in ("", kind) and " ".join(phrase.words) in row.phrases.split(", ")
        for row in LEFT
    )


def _text(source: str) -> Iterator[tuple[int, str, bool]]:
    yield 1, source, False


def _rust(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line, text, and whether it is a name, as `_python`."""
    for found in _RUST.finditer(source):
        line, text = source.count("\n", 0, found.start()) + 1, found[found.lastgroup or 0]
        if found.lastgroup == "comment":
            yield line, re.sub(r"(?m)^\s*//[/!]?", "", text), False
        elif found.lastgroup != "character":
            yield line, text, found.lastgroup == "name" or " " not in text.strip()


def _python(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line, text, and whether it is a name: identifiers, strings, docstrings, comments."""
    comment, comment_line, last = "", 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            # Consecutive comment lines are one text, because a phrase may be broken across them.
            if comment and token.start[0] != last + 1:
                yield comment_line, comment, False
                comment = ""
            comment_line = comment_line if comment else token.start[0]
            comment, last = f"{comment}{token.string}\n", token.start[0]
    yield comment_line, comment, False
    tree = ast.parse(source)
    foreign = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and not (getattr(node, "module", None) or node.names[0].name).startswith("fencepost")
        for alias in node.names
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        match node:
            case ast.Constant(value=str(text)):
                yield line, text, " " not in text.strip()
            case ast.Attribute(value=ast.Name(id=module), attr=_) if module in foreign:
                pass
            case ast.Name(id=name) if name in foreign:
                pass
            case (ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name))) | (
                ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name)
            ):
                yield line, name, True


_PARSERS: Mapping[str, Callable[[str], Iterator[tuple[int, str, bool]]]] = {
    ".py": _python,
    ".pyi": _python,
    ".rs": _rust,
}


def findings(under: Iterable[str] = CHECKED) -> list[Finding]:
    """Sorted by word and file."""
    found = [
        finding
        for name in under
        for path in sorted((ROOT / name).rglob("*") if (ROOT / name).is_dir() else [ROOT / name])
        if path.is_file() and path.suffix in SUFFIXES and _IGNORED.isdisjoint(path.parts) and path not in NOT_CHECKED
        for finding in findings_in(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())
    ]
    return sorted(found, key=lambda each: (each.phrase, each.file, each.line))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.plain_language", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("path", nargs="*", help="only below these")
    found = findings(parser.parse_args().path or CHECKED)
    for each in found:
        print(f"{each}{' (left for now)' if each.left else ''}")
    print(f"{len(found)} findings, {sum(each.left for each in found)} of them left for now")


if __name__ == "__main__":
    main()
