"""`python -m fencepost_proxy.net.metrics_page`: prints `docs/metrics.md`, the reference of metrics.

`tests/monitoring/test_pages.py` fails where the file is not what this prints.
"""

from __future__ import annotations

from typing import Final

from fencepost_proxy.net.exposition import TABLE, Shown

_HEAD: Final = """\
# Metrics and health checks

The tables are made from `proxy/fencepost_proxy/net/exposition.py` by `python -m fencepost_proxy.net.metrics_page`;
change them there. What to do when one of them is not as it should be: [alerts](alerts.md).

With `status = "127.0.0.1:8080"` (or `--status`) the proxy answers over HTTP:

| path | for | answer |
|---|---|---|
| `/metrics` | Prometheus | all of the below, in its text format |
| `/livez` | restarting it | 200 as long as the process turns its event loop; it says nothing about Kafka |
| `/readyz` | sending clients to it | 200, or 503 with one reason a line: Kafka is waited for (and why), the \
state topic is being read, is not there, or was not read recently enough, the process is shutting down |

```yaml
scrape_configs:
  - job_name: fencepost
    static_configs:
      - targets: ["127.0.0.1:8080"]
```

`deploy/grafana/fencepost.json` is a dashboard of them, `deploy/prometheus/alerts.rules.yml` the alerts. Both take the
job's name, `fencepost`, for given.

**Several worker processes** are one target: a scrape asks all of them and shows sums, histograms added bucket by
bucket. A worker that ends takes nothing away from counters. Not summed are log end and shift of a partition (the
highest), the lease (the shortest), certificates, the cluster's transactions and `fencepost_worker_*`.

**How many series there can be.** Labels are Kafka's APIs and versions, words of the proxy's own (at most 64 of each
kind, the rest are `other`), brokers' errors, worker numbers; and partitions, of which at most
`limits.metric_partitions_shown_max` (500, for each process) and three times `limits.watched_shown_max` (20) are
named. How many are left out is a metric. No label is made of what clients send: no client ids, groups or
transactional ids.

**What they cost.** Counting is adding to an integer. The text is made while it is scraped, and so is whatever is not
counted but looked at: log ends, gates, what is in flight.
"""


_COLUMNS: Final = "| metric | type | labels | meaning |\n|---|---|---|---|\n"


def page() -> str:
    """The whole file."""
    parts = [_HEAD]
    for section in TABLE:
        parts.append(
            f"\n## {section.title}\n\n{section.text}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
        )
        parts += map(_row, section.shown)
    return "".join(parts)


def _row(shown: Shown) -> str:
    labels = ", ".join(f"`{label}`" for label in shown.labels) or "–"
    return f"| `{shown.name}` | {shown.kind.value} | {labels} | {shown.help} |\n"


if __name__ == "__main__":
    print(page(), end="")
