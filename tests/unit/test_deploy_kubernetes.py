"""deploy/kubernetes/: what a cluster would say of the manifests, and whether they agree with the proxy and each other.

Kubernetes' own schemas come with the package kubernetes-validate; `strict` is as `kubectl apply --validate=strict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fencepost_proxy.cli import main
from fencepost_proxy.cli.proxy import read_config
from fencepost_proxy.config import Limits, ProxyConfig

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"
KINDS = ("gateway", "sidecar")
#: the first has preStop's sleep without a feature flag; the newest is what the package knows.
RELEASES = ("1.30", "1.37")
WORKLOADS = ("Deployment", "StatefulSet")


def documents(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted((ROOT / kind).glob("*.yaml")):
        if file.name != "kustomization.yaml":
            for document in yaml.safe_load_all(file.read_text("utf-8")):
                yield file.name, document


def of_kind(directory: str, kind: str) -> list[dict[str, Any]]:
    return [document for _, document in documents(directory) if document["kind"] == kind]


def one(directory: str, *kinds: str) -> dict[str, Any]:
    (found,) = [document for kind in kinds for document in of_kind(directory, kind)]
    return found


def pod(directory: str) -> dict[str, Any]:
    spec: dict[str, Any] = one(directory, *WORKLOADS)["spec"]["template"]["spec"]
    return spec


def containers(directory: str) -> list[dict[str, Any]]:
    return [*pod(directory).get("initContainers", []), *pod(directory)["containers"]]


def proxy(directory: str) -> dict[str, Any]:
    (found,) = [each for each in containers(directory) if each["name"] == "fencepost"]
    return found


def configuration(directory: str, tmp_path: Path) -> ProxyConfig:
    """As the proxy reads it, command line included."""
    file = tmp_path / "fencepost.toml"
    file.write_text(one(directory, "ConfigMap")["data"]["fencepost.toml"], "utf-8")
    words = [f"--config={file}" if each.startswith("--config") else each for each in proxy(directory)["args"]]
    return read_config(main.command_parser("proxy").parse_args(["proxy", *words])).config


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("directory", KINDS)
def test_kubernetes_takes_each_and_knows_every_field(directory: str, release: str) -> None:
    found = list(documents(directory))
    for name, document in found:
        try:
            kubernetes_validate.validate(document, release, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise AssertionError(f"{directory}/{name}: {error.message} at {list(error.path)}") from None
    assert len(found) >= 5


@pytest.mark.parametrize("directory", KINDS)
def test_kustomize_is_given_every_file(directory: str) -> None:
    kustomization = yaml.safe_load((ROOT / directory / "kustomization.yaml").read_text("utf-8"))
    files = {file.name for file in (ROOT / directory).glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    assert {each["name"] for each in kustomization["images"]} == {each["image"] for each in containers(directory)}


def test_monitoring_scrapes_every_proxy_under_the_job_of_the_alerts(tmp_path: Path) -> None:
    (monitor,) = of_kind("monitoring", "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (selected,) = monitor["spec"]["selector"]["matchExpressions"]
    for directory in KINDS:
        labels = one(directory, *WORKLOADS)["spec"]["template"]["metadata"]["labels"]
        assert labels[selected["key"]] in selected["values"]
        ports = {each["name"]: each["containerPort"] for each in proxy(directory)["ports"]}
        status = configuration(directory, tmp_path).status
        assert status is not None
        assert ports[endpoint["port"]] == status.port
    scrape = yaml.safe_load((ROOT.parent / "prometheus" / "prometheus.yml").read_text("utf-8"))
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": scrape["scrape_configs"][0]["job_name"]}]
    (rules,) = of_kind("monitoring", "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((ROOT.parent / "prometheus" / "alerts.rules.yml").read_text("utf-8"))
    kustomization = yaml.safe_load((ROOT / "monitoring" / "kustomization.yaml").read_text("utf-8"))
    assert kustomization["resources"] == ["podmonitor.yaml", "prometheusrule.yaml"]


@pytest.mark.parametrize("directory", KINDS)
def test_pods_fit_the_restricted_profile(directory: str) -> None:
    """The strictest of Kubernetes' pod security standards; and a root file system that is read-only."""
    of_pod = pod(directory)["securityContext"]
    assert of_pod["runAsNonRoot"] is True
    assert of_pod["runAsUser"] > 0
    assert of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod(directory)["automountServiceAccountToken"] is False
    for container in containers(directory):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
    assert proxy(directory)["securityContext"]["readOnlyRootFilesystem"] is True
    for volume in pod(directory)["volumes"]:
        assert not {"hostPath", "nfs"} & volume.keys()


@pytest.mark.parametrize("directory", KINDS)
def test_termination_grace_period_covers_the_drain(directory: str, tmp_path: Path) -> None:
    before = proxy(directory).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    limits = configuration(directory, tmp_path).limits
    drain = limits.drain_notice_seconds + limits.drain_seconds
    assert pod(directory)["terminationGracePeriodSeconds"] >= before + drain + 5


@pytest.mark.parametrize("directory", KINDS)
def test_probes_query_existing_paths_and_ports(directory: str, tmp_path: Path) -> None:
    container, status = proxy(directory), configuration(directory, tmp_path).status
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert status is not None
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz"), ("startupProbe", "/livez")):
        assert container[probe]["httpGet"]["path"] == path
        assert ports[container[probe]["httpGet"]["port"]] == status.port


@pytest.mark.parametrize("directory", KINDS)
def test_every_selector_matches_the_pods(directory: str) -> None:
    workload = one(directory, *WORKLOADS)
    labels = workload["spec"]["template"]["metadata"]["labels"]

    def matches(selector: Mapping[str, str]) -> bool:
        return bool(selector) and selector.items() <= labels.items()

    assert matches(workload["spec"]["selector"]["matchLabels"])
    for service in of_kind(directory, "Service"):
        assert matches(service["spec"]["selector"])
    assert matches(one(directory, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"])
    for policy in of_kind(directory, "NetworkPolicy"):
        assert matches(policy["spec"]["podSelector"]["matchLabels"])
    for constraint in pod(directory)["topologySpreadConstraints"]:
        assert matches(constraint["labelSelector"]["matchLabels"])


@pytest.mark.parametrize("directory", KINDS)
def test_volumes_exist_and_secrets_are_only_referenced(directory: str) -> None:
    claims = one(directory, *WORKLOADS)["spec"].get("volumeClaimTemplates", [])
    volumes = {each["name"] for each in pod(directory)["volumes"]} | {each["metadata"]["name"] for each in claims}
    for container in containers(directory):
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
    assert not of_kind(directory, "Secret")
    for each in pod(directory)["volumes"]:
        if "configMap" in each:
            assert each["configMap"]["name"] == one(directory, "ConfigMap")["metadata"]["name"]


@pytest.mark.parametrize("directory", KINDS)
def test_files_of_the_configuration_are_mounted(directory: str, tmp_path: Path) -> None:
    config = configuration(directory, tmp_path)
    mounted = tuple(f"{each['mountPath']}/" for each in proxy(directory)["volumeMounts"])
    named = [
        file
        for table in (config.listen_tls, config.upstream_tls, config.control_sasl)
        if table is not None
        for file in (getattr(table, name) for name in table.__dataclass_fields__ if name.endswith("_file"))
        if file is not None
    ]
    assert named
    for file in named:
        assert str(file).startswith(mounted), file


def test_the_gateway_has_a_port_for_each_broker(tmp_path: Path) -> None:
    config = configuration("gateway", tmp_path)
    bootstrap, brokers = config.listen.port, len(config.upstream)
    requested = [bootstrap, *(bootstrap + 1 + node for node in range(brokers))]
    service = one("gateway", "Service")

    assert [each["port"] for each in service["spec"]["ports"]] == requested
    ports = {each["name"]: each["containerPort"] for each in proxy("gateway")["ports"]}
    assert [ports[each["targetPort"]] for each in service["spec"]["ports"]] == requested
    (clients, _) = one("gateway", "NetworkPolicy")["spec"]["ingress"]
    assert clients["ports"] == [{"protocol": "TCP", "port": requested[0], "endPort": requested[-1]}]
    assert config.advertised_host is not None
    assert config.advertised_host.startswith(f"{service['metadata']['name']}.")


def test_sidecars_broker_advertises_the_proxy_to_clients_only(tmp_path: Path) -> None:
    config = configuration("sidecar", tmp_path)
    (broker,) = [each for each in pod("sidecar")["containers"] if each["name"] == "kafka"]
    reported = {each["name"]: each.get("value", "") for each in broker["env"]}
    listeners = dict(each.split("://") for each in reported["KAFKA_LISTENERS"].split(","))
    advertised = dict(each.split("://") for each in reported["KAFKA_ADVERTISED_LISTENERS"].split(","))
    (own_name,) = [each["value"] for each in proxy("sidecar")["env"] if each["name"] == "FENCEPOST_ADVERTISED_HOST"]

    assert (config.mode, str(config.broker)) == ("sidecar", listeners["CLIENTS"])
    assert advertised["CLIENTS"] == f"{own_name}:{config.listen.port}"
    assert {each.port for each in config.upstream} == {int(listeners["BROKERS"].rpartition(":")[2])}
    assert advertised["BROKERS"].rpartition(":")[2] == listeners["BROKERS"].rpartition(":")[2]
    assert len(config.upstream) == one("sidecar", "StatefulSet")["spec"]["replicas"]
    (clients, *_) = one("sidecar", "NetworkPolicy")["spec"]["ingress"]
    assert clients["ports"] == [{"protocol": "TCP", "port": config.listen.port}]


def test_memory_is_enough_for_what_the_limits_allow() -> None:
    """Buffered frames, and 10 KB for each connection (measured in docs/performance.md), above the size of a process."""
    limits = Limits()
    needed = limits.buffered_bytes_max + limits.connections_max * 10_000 + 64 * 2**20
    for directory in KINDS:
        limit = proxy(directory)["resources"]["limits"]["memory"]
        assert limit.endswith("Mi")
        assert int(limit.removesuffix("Mi")) * 2**20 > needed


def patched(document: dict[str, Any], patch: str) -> dict[str, Any]:
    """As `kustomize` applies a JSON patch: to members of objects, and of the first container."""
    for each in yaml.safe_load(patch):
        *path, last = each["path"].removeprefix("/").split("/")
        place: Any = document
        for name in path:
            place = place[int(name) if name.isdigit() else name]
        if each["op"] == "remove":
            del place[last]
        else:
            assert (last in place) is (each["op"] == "replace"), each
            place[last] = each["value"]
    return document


@pytest.mark.parametrize("release", RELEASES)
def test_fleet_with_homes_is_the_patched_gateway(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = yaml.safe_load((ROOT / "homes" / "kustomization.yaml").read_text("utf-8"))
    (patch,) = overlay["patches"]
    workload = patched(one("gateway", "Deployment"), patch["patch"])
    service = one("homes", "Service")
    for document in (workload, service, one("homes", "NetworkPolicy")):
        kubernetes_validate.validate(document, release, strict=True)
    assert set(overlay["resources"]) == {"../gateway", *(file for file, _ in documents("homes"))}
    assert workload["spec"]["serviceName"] == service["metadata"]["name"]
    for each in workload["spec"]["template"]["spec"]["containers"][0]["env"]:
        monkeypatch.setenv(each["name"], each.get("value", "").replace("$(POD)", "fencepost-1"))
    config = configuration("gateway", tmp_path)
    assert (config.homes, config.advertised_host) == (True, "fencepost-1.fencepost-pods.kafka.svc.cluster.local")
