"""Generates the pages in `docs/`, and other files, that are made from the sources: `python -m tests.pages`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from tests.contract import cases
from tests.contract.tables import TABLES
from tests.pages import alerts, apis, config, glossary, logs, messages, metrics

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "api-table.md": apis.page,
    "configuration.md": config.page,
    "glossary.md": glossary.page,
    "logs.md": logs.page,
    "../tests/pages/messages.md": messages.page,
    "metrics.md": metrics.page,
    "../deploy/kubernetes/monitoring/prometheusrule.yaml": alerts.page,
    **{f"../contract/cases/{table}.json": partial(cases.page, table) for table in TABLES},
}
