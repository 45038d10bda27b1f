"""`docs/api-table.md`, the table of APIs."""

from __future__ import annotations

from fencepost_proxy.wire.apis import APIS, CAPS, Api, Handling

_HEAD = """\
# What the proxy does with each Kafka API

Generated from `proxy/fencepost_proxy/wire/apis.py`: change it there, then run `python -m tests.pages`.

A client gets the versions that both this table and its broker have.

| handling | meaning |
|---|---|
| relayed | The proxy forwards the bytes without decoding them. |
| addresses rewritten | The proxy forwards the bytes, and follows their lengths to the addresses after the records. |
| inspected | The proxy searches the request for the state topic, and forwards it unchanged if it is not named. |
| request rewritten, response rewritten | The proxy decodes, changes and encodes it. |
| checked | Produce. The proxy streams it, unless it concerns a checked topic. |
| relayed alone | The proxy forwards it after all earlier requests on the connection are answered. |
| not advertised | The proxy closes the connection of a client that sends it, as Kafka does for an unknown version. |

| key | API | versions | handling | why |
|---|---|---|---|---|
"""

_CAPS = """
## Versions that clients do not get

| API | clients get | Kafka 4.4 has | why | what it costs | what it would take |
|---|---|---|---|---|---|
"""
_OTHERS = """
APIs that are not advertised cost a client nothing: only brokers and controllers use them. Versions before the first one
of the table are those that Kafka 4.0 removed, and version 0 of share groups, which was an early access.
"""

_WORDS = {
    Handling.INSPECT_REQUEST: "inspected",
    Handling.REWRITE_REQUEST: "request rewritten",
    Handling.REWRITE_RESPONSE: "response rewritten",
    Handling.REWRITE_ENDPOINTS: "addresses rewritten",
    Handling.PRODUCE: "checked",
    Handling.ALONE: "relayed alone",
    Handling.HIDDEN: "not advertised",
}


def handling_of(api: Api) -> str:
    """The handling in words, as the table's legend explains them."""
    return ", ".join(word for flag, word in _WORDS.items() if flag in api.handling) or "relayed"


def versions_of(api: Api) -> str:
    if api.gated:
        return "–"
    return f"{api.min_version}–{api.max_version}" if api.max_version > api.min_version else f"{api.min_version}"


def page() -> str:
    rows = [
        f"| {api.key} | {api.name} | {versions_of(api)} | {handling_of(api)} | {api.reason} |\n"
        for api in APIS.values()
    ]
    caps = [
        f"| {APIS[key].name} | {versions_of(APIS[key])} | {cap.newest} | {cap.reason} | {cap.cost} | {cap.needs} |\n"
        for key, cap in CAPS.items()
    ]
    return _HEAD + "".join(rows) + _CAPS + "".join(caps) + _OTHERS
