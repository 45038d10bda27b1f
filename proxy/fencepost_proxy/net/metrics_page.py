"""`python -m fencepost_proxy.net.metrics_page`: prints `docs/metrics.md`, the metrics reference.

`tests/monitoring/test_pages.py` fails if the file differs from the output.
"""

from __future__ import annotations

from typing import Final

from fencepost_proxy.net.exposition import TABLE, Shown

_HEAD: Final = """\
# Metrics and health checks

`python -m fencepost_proxy.net.metrics_page` generates this page from `proxy/fencepost_proxy/net/exposition.py`. What to
do when a metric shows a problem: [alerts](alerts.md).

With `status = "127.0.0.1:8080"` (or `--status`) the proxy serves HTTP:

| path | for | response |
|---|---|---|
| `/metrics` | Prometheus | all metrics below, in Prometheus text format |
| `/livez` | liveness probe | 200 while the event loop runs, whatever the state of Kafka |
| `/readyz` | readiness probe | 200, or 503 with one reason per line: Kafka is unreachable (and why), the \
state topic is being read, is missing or was not read recently enough, or the process is shutting down |

```yaml
scrape_configs:
  - job_name: fencepost
    static_configs:
      - targets: ["127.0.0.1:8080"]
```

`deploy/grafana/fencepost.json` is a dashboard, `deploy/prometheus/alerts.rules.yml` the alerts. Both expect the job
name `fencepost`.

**Several worker processes** are one target: a scrape collects from all of them and shows sums, with histograms added
bucket by bucket. Counters keep the values of workers that ended. Exceptions: log end and shift of a partition (the
highest), the lease (the shortest), certificates, the cluster's transactions and `fencepost_worker_*`.

**Number of series.** Label values are Kafka's APIs and versions, the proxy's own words (at most 64 per kind, the rest
are `other`), broker errors, worker numbers and partitions. At most `limits.metric_partitions_shown_max` (500, for each
process) plus three times `limits.watched_shown_max` (20) partitions are named; a metric counts the omitted ones. No
label value comes from clients: no client ids, groups or transactional ids.

**Cost.** Counting adds to an integer. A scrape formats the text and reads the values that are not counters: log ends,
sequencers, requests in progress.
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
