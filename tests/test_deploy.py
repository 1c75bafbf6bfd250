"""The deployment files against the command line, the protos and the metrics that they name."""

import asyncio
import configparser
import json
import pathlib
import re
import shlex

import pytest
import yaml
from fake_engine import FakeEngine
from harness import running
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tpuspec.protos import generation_pb2
from tpuspec.serving import server
from tpuspec.serving.cli import make_parser

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "tools" / "deploy"


def serve_flags(words: list[str]):
    """The flags of a command line; exits if ``tpuspec`` would not take them."""
    assert words[:2] == ["tpuspec", "serve"]
    return make_parser().parse_args(words[1:])


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """Names of all samples that a server exports once it has answered."""
    async def names() -> set[str]:
        async with running(FakeEngine(accepts=1)) as it:
            await it.answer([10, 9])
            text = generate_latest(it.server.metrics.registry).decode()
        return {sample.name for family in text_string_to_metric_families(text)
                for sample in family.samples}

    return asyncio.run(names())


@pytest.fixture(scope="module")
def container() -> dict[str, list[str]]:
    """Arguments by instruction."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            instruction, _, rest = line.partition(" ")
            found.setdefault(instruction, []).append(rest)
    return found


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict]:
    """By kind."""
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    return {document["kind"]: document for document in documents}


def test_container_copies_what_there_is_and_starts_a_server(container):
    assert set(container) == {"FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE",
                              "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    copied = [name for line in container["COPY"] for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {"tpuspec", "kernels", "serving", "protos", "pyproject.toml", "LICENSE"} <= set(copied)
    entry, = container["ENTRYPOINT"]
    command, = container["CMD"]
    args = serve_flags(json.loads(entry) + json.loads(command))
    assert args.host == "0.0.0.0" and args.platform == "tpu" and args.log_json
    assert container["EXPOSE"] == [f"{args.port} {args.metrics_port}"]
    assert container["STOPSIGNAL"] == ["SIGTERM"] and container["USER"] != ["0"]


SCHEMA = json.loads((ROOT / "tests/data/kubernetes_schema.json").read_text())["definitions"]
KINDS = {"Deployment": "apps", "Service": "core", "PodDisruptionBudget": "policy",
         "HorizontalPodAutoscaler": "autoscaling"}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int,
         "number": (int, float)}


def fault(value: object, schema: dict, path: str = "") -> str | None:
    """The first place where a value is not what its schema says; fields that it lacks are faults,
    too, as Kubernetes refuses what it does not know."""
    if "$ref" in schema:
        return fault(value, SCHEMA[schema["$ref"]], path)
    if "oneOf" in schema:
        faults = [fault(value, one, path) for one in schema["oneOf"]]
        return None if None in faults else faults[0]
    kind = schema.get("type", "object")
    if not isinstance(value, TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return f"{path} must be of type {kind}"
    if value not in schema.get("enum", [value]):
        return f"{path} must be one of {schema['enum']}"
    if isinstance(value, list):
        parts = [(f"{path}[{place}]", item, schema["items"]) for place, item in enumerate(value)]
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        missing = [name for name in schema.get("required", []) if name not in value]
        unknown = [name for name in value if name not in known and others is False]
        if missing or unknown:
            return f"{path} lacks {missing}" if missing else f"{path} has unknown {unknown}"
        parts = [(f"{path}.{name}", item, known.get(name, others))
                 for name, item in value.items() if known.get(name, others) is not True]
    else:
        return None
    return next((found for part in parts if (found := fault(part[1], part[2], part[0]))), None)


def fault_of(manifest: dict) -> str | None:
    version = manifest["apiVersion"].rpartition("/")[2]
    kind = manifest["kind"]
    return fault(manifest, SCHEMA[f"io.k8s.api.{KINDS[kind]}.{version}.{kind}"], kind)


def test_manifests_are_what_kubernetes_takes(manifests):
    assert set(manifests) == set(KINDS)
    for manifest in manifests.values():
        assert fault_of(manifest) is None


@pytest.mark.parametrize("kind, line, broken, said", [
    ("Deployment", "containerPort: 8500", "containerPorts: 8500",
     "Deployment.spec.template.spec.containers[0].ports[0] lacks ['containerPort']"),
    ("Deployment", "failureThreshold: 180", "failureTreshold: 180",
     "Deployment.spec.template.spec.containers[0].startupProbe has unknown ['failureTreshold']"),
    ("Deployment", "runAsNonRoot: true", "runAsNonRoot: 1",
     "Deployment.spec.template.spec.securityContext.runAsNonRoot must be of type boolean"),
    ("Service", "port: 9090", "port: '9090'", "Service.spec.ports[1].port must be of type integer"),
    ("HorizontalPodAutoscaler", "maxReplicas: 4", "maxReplicas: many",
     "HorizontalPodAutoscaler.spec.maxReplicas must be of type integer")])
def test_a_manifest_that_kubernetes_would_refuse_is_seen(kind, line, broken, said):
    text = (DEPLOY / "kubernetes.yaml").read_text()
    assert line in text
    changed = next(document for document in yaml.safe_load_all(text.replace(line, broken))
                   if document["kind"] == kind)
    assert fault_of(changed) == said


def test_manifests_have_the_fields_that_their_kinds_require(manifests):
    versions = {"Deployment": "apps/v1", "Service": "v1", "PodDisruptionBudget": "policy/v1",
                "HorizontalPodAutoscaler": "autoscaling/v2"}
    assert {kind: m["apiVersion"] for kind, m in manifests.items()} == versions
    assert all(m["metadata"]["name"] == "tpuspec" and "spec" in m for m in manifests.values())
    deployment = manifests["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    for selector in (deployment["selector"]["matchLabels"], manifests["Service"]["spec"][
            "selector"], manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]):
        assert selector and selector.items() <= labels.items()
    pod = deployment["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    container, = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    tpus = "google.com/tpu"
    assert container["resources"]["limits"][tpus] == container["resources"]["requests"][tpus] == 1
    assert any(name.endswith("gke-tpu-accelerator") for name in pod["nodeSelector"])


def pod_flags(container, manifests):
    """Of the pod's server: the image's entry point with the pod's arguments."""
    server_, = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    entry, = container["ENTRYPOINT"]
    return serve_flags(json.loads(entry) + server_["args"])


def test_pod_is_probed_where_it_listens_and_for_a_service_that_there_is(container, manifests):
    args = pod_flags(container, manifests)
    pod = manifests["Deployment"]["spec"]["template"]
    server_, = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in server_["ports"]}
    assert ports == {"grpc": args.port, "metrics": args.metrics_port}
    service, = generation_pb2.DESCRIPTOR.services_by_name.values()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server_[probe]["grpc"] == {"port": args.port, "service": service.full_name}
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(args.metrics_port)
    assert {port["name"]: port["port"] for port in manifests["Service"]["spec"]["ports"]} == ports
    assert {port["targetPort"] for port in manifests["Service"]["spec"]["ports"]} == set(ports)
    mounts = [mount["mountPath"] for mount in server_["volumeMounts"]]
    for path in (args.target, args.draft):
        assert any(path.startswith(f"{mount}/") for mount in mounts)
    cache, = container["ENV"]
    assert cache.removeprefix("JAX_COMPILATION_CACHE_DIR=") in mounts


def test_pod_has_the_time_that_a_drain_takes(container, manifests):
    grace = pod_flags(container, manifests).grace_seconds
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    server_, = pod["containers"]
    sleep, seconds = server_["lifecycle"]["preStop"]["exec"]["command"]
    longest = int(seconds) + grace + server._JOIN_SECONDS
    assert sleep == "sleep" and longest < pod["terminationGracePeriodSeconds"]
    liveness = server_["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > longest


def test_autoscaler_goes_by_a_metric_that_is_exported(manifests, metrics):
    spec = manifests["HorizontalPodAutoscaler"]["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment",
                                      "name": manifests["Deployment"]["metadata"]["name"]}
    assert 1 <= spec["minReplicas"] <= spec["maxReplicas"]
    names = {metric["pods"]["metric"]["name"] for metric in spec["metrics"]}
    assert names == {"tpuspec_queued_requests"} and names <= metrics


def test_systemd_unit_starts_a_server_and_lets_it_drain():
    text = (DEPLOY / "tpuspec.service").read_text().replace("\\\n", " ")
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str
    unit.read_string(text)
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    binary, *words = shlex.split(service["ExecStart"])
    args = serve_flags([pathlib.PurePath(binary).name, *words])
    assert args.grace_seconds + server._JOIN_SECONDS < int(service["TimeoutStopSec"])
    assert service["KillSignal"] == "SIGTERM" and service["Restart"] == "on-failure"
    cache = service["Environment"].removeprefix("JAX_COMPILATION_CACHE_DIR=")
    assert cache == f"/var/cache/{service['CacheDirectory']}"  # else it could not be written
    for path in (args.target, args.draft):
        assert path.startswith(f"/var/lib/{service['StateDirectory']}/")


def test_dashboard_shows_metrics_that_are_exported(metrics):
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    assert board["title"] == "tpuspec" and board["schemaVersion"] >= 36
    variables = {variable["name"] for variable in board["templating"]["list"]}
    places, named = set(), set()
    for panel in board["panels"]:
        assert panel["type"] == "timeseries" and panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        places.add((place["x"], place["y"]))
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            named |= set(re.findall(r"(?:tpuspec_|vllm:)\w+", target["expr"]))
            used = set(re.findall(r"\$\{?(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables
    assert len(places) == len(board["panels"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert named <= metrics and {
        "tpuspec_alpha", "tpuspec_cost_coefficient", "tpuspec_queued_requests",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total"} <= named
