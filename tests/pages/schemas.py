"""Writes `wire/schemas.json`, Kafka's message schemas, from the jar of its release: `python -m tests.pages.schemas`."""

from __future__ import annotations

import json
import re
import zipfile
from typing import Any, Final

from fencepost_dev.jars import DEFAULT_VERSION, RELEASES, fetch
from fencepost_proxy.wire.apis import APIS
from tests.support.docs import ROOT

_OF_A_FIELD: Final = ("name", "type", "versions", "nullableVersions", "taggedVersions", "tag", "default", "fields")


SCHEMAS: Final = ROOT / "proxy" / "fencepost_proxy" / "wire" / "schemas.json"


def page() -> str:
    """A line for each request and response of the API table, with what a codec needs."""
    names = sorted(f"{api.name}{kind}" for api in APIS.values() for kind in ("Request", "Response"))
    with zipfile.ZipFile(_jar()) as jar:
        read = ((name, _read(jar, name)) for name in names)
        lines = [f"{json.dumps(name)}: {json.dumps(each, separators=(',', ':'))}" for name, each in read if each]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _jar() -> str:
    jars = fetch(RELEASES[DEFAULT_VERSION].broker_lock)
    return str(next(each for each in jars if each.name == f"kafka-clients-{DEFAULT_VERSION}.jar"))


def _read(jar: zipfile.ZipFile, name: str) -> dict[str, Any] | None:
    """None if it has no version any more."""
    with jar.open(f"common/message/{name}.json") as file:
        schema = json.loads(re.sub(r"(?m)^\s*//.*$", "", file.read().decode()))
    if schema["validVersions"] == "none":
        return None
    kept = {key: schema[key] for key in ("validVersions", "flexibleVersions")}
    kept["fields"] = [_field(each) for each in schema["fields"]]
    if "commonStructs" in schema:
        kept["commonStructs"] = [_field(each) for each in schema["commonStructs"]]
    return kept


def _field(field: dict[str, Any]) -> dict[str, Any]:
    kept = {key: field[key] for key in _OF_A_FIELD if key in field}
    if "fields" in kept:
        kept["fields"] = [_field(each) for each in kept["fields"]]
    return kept


if __name__ == "__main__":
    SCHEMAS.write_text(page(), "utf-8")
