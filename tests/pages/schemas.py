"""Writes `wire/schemas.json`, Kafka's message schemas, from jars of its releases: `python -m tests.pages.schemas`."""

from __future__ import annotations

import json
import re
import zipfile
from typing import Any, Final

from fencepost_dev.jars import DEFAULT_VERSION, RELEASES, fetch_jars, read_lock
from fencepost_proxy.wire.apis import APIS
from tests.support.docs import ROOT

_OF_A_FIELD: Final = ("name", "type", "versions", "nullableVersions", "taggedVersions", "tag", "default", "fields")


#: The oldest release of which brokers are served, and the APIs of which the table serves versions that only it has.
_OLDEST: Final = "3.9.2"
_SERVED_OLDER: Final = frozenset({"Fetch", "CreateTopics", "DeleteTopics", "DescribeConfigs"})

SCHEMAS: Final = ROOT / "proxy" / "fencepost_proxy" / "wire" / "schemas.json"


def page() -> str:
    """A line for each request and response of the API table, with what a codec needs."""
    names = sorted(f"{api.name}{kind}" for api in APIS.values() for kind in ("Request", "Response"))
    older = {f"{name}{kind}" for name in _SERVED_OLDER for kind in ("Request", "Response")}
    with zipfile.ZipFile(_jar(DEFAULT_VERSION)) as jar, zipfile.ZipFile(_jar(_OLDEST)) as oldest:
        read = ((name, _read(jar, name, oldest if name in older else None)) for name in names)
        lines = [f"{json.dumps(name)}: {json.dumps(each, separators=(',', ':'))}" for name, each in read if each]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _jar(version: str) -> str:
    lock = RELEASES[version].broker_lock
    (jar,) = fetch_jars(tuple(each for each in read_lock(lock) if each.artifact == "kafka-clients"), lock)
    return str(jar)


def _read(jar: zipfile.ZipFile, name: str, oldest: zipfile.ZipFile | None) -> dict[str, Any] | None:
    """None if it has no version any more. With the versions that only `oldest` has."""
    schema = _parsed(jar, name)
    if schema["validVersions"] == "none":
        return None
    if oldest is not None:
        _add_older(schema, _parsed(oldest, name))
    kept = {key: schema[key] for key in ("validVersions", "flexibleVersions")}
    kept["fields"] = [_field(each) for each in schema["fields"]]
    if "commonStructs" in schema:
        kept["commonStructs"] = [_field(each) for each in schema["commonStructs"]]
    return kept


def _parsed(jar: zipfile.ZipFile, name: str) -> dict[str, Any]:
    with jar.open(f"common/message/{name}.json") as file:
        parsed: dict[str, Any] = json.loads(re.sub(r"(?m)^\s*//.*$", "", file.read().decode()))
    return parsed


def _add_older(schema: dict[str, Any], old: dict[str, Any]) -> None:
    first, last = old["validVersions"].split("-")[0], schema["validVersions"].split("-")[-1]
    schema["validVersions"] = f"{first}-{last}"
    _add_fields(schema["fields"], old["fields"])


def _add_fields(fields: list[dict[str, Any]], old: list[dict[str, Any]]) -> None:
    """Fields of older versions only, each after the one that it follows there."""
    at = 0
    for field in old:
        names = [each["name"] for each in fields]
        if field["name"] not in names:
            fields.insert(at, field)
            at += 1
            continue
        at = names.index(field["name"]) + 1
        _add_fields(fields[at - 1].get("fields", []), field.get("fields", []))


def _field(field: dict[str, Any]) -> dict[str, Any]:
    kept = {key: field[key] for key in _OF_A_FIELD if key in field}
    if "fields" in kept:
        kept["fields"] = [_field(each) for each in kept["fields"]]
    return kept


if __name__ == "__main__":
    SCHEMAS.write_text(page(), "utf-8")
