"""`python -m fencepost_proxy.dev.api_table`: prints `docs/api-table.md`, the handling of each Kafka API.

`tests/unit/test_api_table.py` fails if the file is out of date.
"""

from __future__ import annotations

from fencepost_proxy.wire.apis import APIS, Api, Treatment

_HEAD = """\
# Kafka APIs

This page is generated from `proxy/fencepost_proxy/wire/apis.py`:
`python -m fencepost_proxy.dev.api_table > docs/api-table.md`.

A client's ApiVersions response contains the versions that this table and the client's broker have in common.

- *relayed*: bytes pass unread.
- *inspected*: the request is searched for the name of the state topic, and passes unchanged if it does not contain it.
- *request rewritten*, *response rewritten*: decoded, changed and encoded again.
- *checked*: Produce. Bytes pass unread unless a checked topic is concerned.
- *relayed alone*: the request waits until all earlier requests on its connection are answered.
- *not served*: not advertised. The proxy closes the connection of a client that sends it, as Kafka does for a version
  that it does not know.

| key | API | versions | handling | reason |
|---|---|---|---|---|
"""

_WORDS = {
    Treatment.INSPECT_REQUEST: "inspected",
    Treatment.REWRITE_REQUEST: "request rewritten",
    Treatment.REWRITE_RESPONSE: "response rewritten",
    Treatment.PRODUCE: "checked",
    Treatment.ALONE: "relayed alone",
    Treatment.WITHHELD: "not served",
}


def treatment_of(api: Api) -> str:
    """The terms of the page's legend."""
    return ", ".join(word for flag, word in _WORDS.items() if flag in api.treatment) or "relayed"


def versions_of(api: Api) -> str:
    if api.withheld:
        return "–"
    return f"{api.min_version}–{api.max_version}" if api.max_version > api.min_version else f"{api.min_version}"


def api_table() -> str:
    """The whole file."""
    rows = [
        f"| {api.key} | {api.name} | {versions_of(api)} | {treatment_of(api)} | {api.reason} |\n"
        for api in APIS.values()
    ]
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    print(api_table(), end="")
