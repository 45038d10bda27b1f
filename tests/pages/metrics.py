"""`docs/metrics.md`, the reference of metrics."""

from __future__ import annotations

from typing import Final

from fencepost_proxy.observability.exposition import SECTIONS
from fencepost_proxy.observability.prometheus import Shown

_HEAD: Final = """\
# Metrics and health checks

Every metric and health check of the proxy. What to do when one shows a problem: [alerts](alerts.md).

With `status = "127.0.0.1:8080"` (or `--status`) the proxy serves these over HTTP:

| path | for | response |
|---|---|---|
| `/metrics` | Prometheus | the metrics below, in Prometheus text format |
| `/livez` | restarting the process | 200 while the event loop runs. It says nothing about Kafka. |
| `/readyz` | routing clients to the process | 200, or 503 and a reason per line: Kafka cannot be reached; the \
state topic is missing, is being loaded, or was not read recently enough; the process is shutting down |

```yaml
scrape_configs:
  - job_name: fencepost
    static_configs:
      - targets: ["127.0.0.1:8080"]
```

`deploy/grafana/fencepost.json` is a dashboard, and `deploy/prometheus/alerts.rules.yml` has the alerts. For the
Prometheus operator, `deploy/kubernetes/monitoring` has these alerts and the scrape. The alerts expect a job named
`fencepost`, or with that as a part: `kafka/fencepost`.

With `status_read_token_file`, add `authorization: {credentials_file: FILE}`, and with `status_tls` also `scheme: https`
([status page](status.md#access)). OpenTelemetry: the collector's `prometheus` receiver reads the same.

**Number of series.** Label values are Kafka's APIs and versions, fixed words of the proxy (at most 64 of each kind, the
rest are `other`), and broker errors. Partitions are labels too: at most
`limits.metric_partitions_shown_max` (500) per process, and three times `limits.watched_shown_max` (20). A metric counts
the partitions that are left out. Client ids, groups and transactional ids are never labels.

**Cost.** Counting adds to an integer. The text is built during the scrape, and so are values that are read rather
than counted: log ends, sequencers and requests in flight.

The tables are generated from `proxy/fencepost_proxy/observability/exposition.py`: change them there, then run
`python -m tests.pages`.
"""


def page() -> str:
    parts = [_HEAD]
    for section in SECTIONS:
        parts.append(
            f"\n## {section.title}\n\n{section.text}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
        )
        parts += map(_row, section.shown)
    return "".join(parts)


def _row(shown: Shown) -> str:
    labels = ", ".join(f"`{label}`" for label in shown.labels) or "–"
    return f"| `{shown.name}` | {shown.kind} | {labels} | {shown.help} |\n"
