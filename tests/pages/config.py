"""`docs/configuration.md`, the reference of configuration keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fencepost_policies.registry import CHECKS
from fencepost_proxy.config.keys import SHOWN, TABLES
from fencepost_proxy.config.reference import default_of
from fencepost_proxy.topics.virtual_configs import VIRTUAL_CONFIGS

_HEAD: Final = """\
# Configuration

Reference of all configuration keys. Generated from `proxy/fencepost_proxy/config/__init__.py`: change it there, then
run `python -m tests.pages`.

`fencepost proxy --config FILE` reads one TOML file. Only `upstream` is required. Unknown keys are errors. All errors
are reported together, with file and line.

| to | command |
|---|---|
| explain a key | `fencepost config explain limits.drain_seconds` |
| create a file with all keys, commented out | `fencepost config explain --toml > fencepost.toml` |
| show the effective values and their origin | `fencepost config show --config fencepost.toml` |
| test the configuration against Kafka | `fencepost check --config fencepost.toml` |

## Precedence

For each key, the command line overrides the environment, which overrides `--command-config`, which overrides the file,
which overrides the default.
`topics`, `unlisted_topics` and `broker_ports` are each taken from one source as a whole.

The environment variable of a key is `FENCEPOST_` and the key in upper case, with `__` for the dot:
`FENCEPOST_LIMITS__DRAIN_SECONDS`. Lists are separated by commas
(`FENCEPOST_BOOTSTRAP_SERVER=kafka-1:9092,kafka-2:9092`, another name of `FENCEPOST_UPSTREAM`).
Tables are TOML on one line (`FENCEPOST_BROKER_PORTS='{ 1 = 20001 }'`; `FENCEPOST_UPSTREAM_TLS='{}'` for an empty
one). Empty variables are ignored. Misspelt variables are errors; variables that Kubernetes sets for a service named
`fencepost` are not. `FENCEPOST_CONFIG` names the file if `--config` is missing.

`FENCEPOST_NATIVE=off` is no key: it switches off the [native module](installation.md#native-module).

## Kafka's client.properties

`--command-config FILE` reads the security properties of a Java client, as Kafka's tools do. It sets `upstream_tls` and
`control_sasl`, and replaces both tables of the configuration file.

| property | sets |
|---|---|
| `security.protocol` | which tables are present: `PLAINTEXT`, `SSL`, `SASL_PLAINTEXT` or `SASL_SSL` |
| `sasl.mechanism` | `control_sasl.mechanism`: `PLAIN`, `SCRAM-SHA-256` or `SCRAM-SHA-512` |
| `sasl.jaas.config`, or `sasl.username` and `sasl.password` | user name; password, read at every login |
| `ssl.truststore.location` or `ssl.truststore.certificates`, or `ssl.ca.location` | `upstream_tls.ca_file` |
| `ssl.keystore.location` | `upstream_tls.certificate_file`: certificates and key in one file |
| `ssl.truststore.type`, `ssl.keystore.type` | must be `PEM` |
| `ssl.endpoint.identification.algorithm` | `upstream_tls.check_hostname`: empty for false |

Other security properties are errors, and the message says what to do: JKS and PKCS12 stores must be converted to PEM.
Properties that do not concern security, such as `client.id`, and those that `security.protocol` does not use are
ignored and logged at debug level. A file without security properties replaces nothing.

## Reload with SIGHUP

On SIGHUP the proxy reads file, `--command-config` and environment again and applies the keys marked ↻. One log line
names the changed keys and those that need a restart. A file with an error changes nothing, and the log says where the
error is.
Certificates, keys and passwords are also reloaded without SIGHUP.

## What `fencepost check` tests

The check changes nothing, except that Kafka allocates one producer id. It can run while a proxy runs
(`fencepost check --running`). It ends within a minute (`fencepost check --timeout 10`). `fencepost check --json`
prints JSON. Exit status 0: the proxy would work, perhaps with warnings. 1: something failed. 2: the configuration is
wrong.

- **files**: certificates, keys and secrets are readable, only by the proxy, and match; when certificates expire;
  whether they are valid for `advertised_host`
- **Kafka**: every server of `upstream`, and every broker at its advertised address: name resolution, connection, TLS,
  login, certificate expiry; all belong to one cluster; its release; the brokers support the APIs that the proxy uses;
  for a sidecar, its broker advertises the sidecar to clients
- **Kafka ACLs of the proxy**: describe, create, read and write the state topic; get a producer id; read brokers'
  settings; read, write and describe checked topics (*topics in the file*, *topics set by admins*: from the state
  topic); add partitions to topics with ordered partition expansion; read all topics, for the transaction watch;
  describe groups and transactional ids. For each missing permission it prints a `kafka-acls` command;
  `admin.properties` in it contains an administrator's login
- **Appends that bypass the proxy**: whether ACLs [prevent them](security.md#writers-that-bypass-the-proxy)
- **what Kafka itself may lose** of checked topics: too few replicas, `min.insync.replicas`, unclean leader elections
- **what several proxies cannot prevent**: with `reuse_port`, topics with `fencepost.check.expected.offsets=true`
- **this machine**: every listener's address is free, `advertised_host` resolves, the open file limit is enough for
  `limits.connections_max`

Rights on topics that do not exist yet are *unknown*.

"""


def page() -> str:
    lines = [_HEAD + "## Keys\n"]
    before: str | None = None
    for key in SHOWN:
        heading = key.table or ("tables" if "table" in key.kind.words else "")
        if heading != before:
            if key.table:
                lines += ["", f"## [{key.table}]", "", TABLES[key.table].doc]
            elif heading:
                lines += ["", "## Tables of names and values"]
            lines += ["", "| key | type | default | meaning |", "|---|---|---|---|"] if before is not None else _COLUMNS
            before = heading
        name = key.field_name if key.table else key.name
        option = f" Option `{key.option}`." if key.option else ""
        cells = (f"`{name}`{' ↻' if key.live else ''}", _code(key.type), _code(default_of(key)))
        lines.append(f"| {' | '.join(cells)} | {_cell(key.doc + option)} |")
    return "\n".join([*lines, "", _TOPICS_EXAMPLE, *_topic_configs(), ""])


def _topic_configs() -> Iterator[str]:
    yield from ("| topic config | values | meaning | reasons of refusals |", "|---|---|---|---|")
    reasons = {check.config.name: ", ".join(f"`{each}`" for each in check.reasons) for check in CHECKS}
    for name, config in VIRTUAL_CONFIGS.items():
        values = f"{config.valid} (default `{config.default}`)"
        yield f"| `{name}` | {values} | {_cell(config.documentation)} | {reasons.get(name, '')} |"


_COLUMNS: Final = ["| key | type | default | meaning |", "|---|---|---|---|"]
_TOPICS_EXAMPLE: Final = """\
```toml
[topics."orders-*"]                          # the first matching pattern applies alone
"fencepost.check.expected.offsets" = "required"        # names with dots need quotes

[unlisted_topics]
"fencepost.idempotence.level" = "required"
```

A config set on the topic itself overrides the file.

## Topic configs

How to set them, and what producers send and get: [the contract](contract.md#topic-configs). `fencepost config explain
fencepost.check.expected.offsets` explains one. Reasons are labels of `fencepost_refusals_total`.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if '"' in text or text[:1] in "[{" or text[:1].isdigit() or text in ("true", "false") else text
