"""`python -m fencepost_proxy.dev.api_table`: prints `docs/api-table.md`, the table of APIs for a reader.

`tests/unit/test_api_table.py` fails where the file is not what this prints.
"""

from __future__ import annotations

from fencepost_proxy.wire.apis import APIS, Api, Treatment

_HEAD = """\
# What the proxy does with each Kafka API

Made from `proxy/fencepost_proxy/wire/apis.py` by `python -m fencepost_proxy.dev.api_table`; change it there.

*relayed*: the bytes pass, unread. *looked into*: the request is searched for the state topic's name and passes as it is
where it does not name it. *request rewritten*, *response rewritten*: decoded, changed, encoded anew. *gated*: Produce,
streamed through unless it concerns a guarded topic. *relayed alone*: it waits until all before it on its connection was
answered, and then passes. *withheld*: not advertised, and a client that sends it is
disconnected, as Kafka does with a version that it does not know. A client is told the versions that this table and its
broker have in common.

| key | API | versions | treatment | why |
|---|---|---|---|---|
"""

_WORDS = {
    Treatment.INSPECT_REQUEST: "looked into",
    Treatment.REWRITE_REQUEST: "request rewritten",
    Treatment.REWRITE_RESPONSE: "response rewritten",
    Treatment.PRODUCE: "gated",
    Treatment.ALONE: "relayed alone",
    Treatment.WITHHELD: "withheld",
}


def treatment_of(api: Api) -> str:
    """In words, as the table's legend explains them."""
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
