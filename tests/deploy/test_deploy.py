"""What is in deploy/ passes the field's linters, fits together, and names what there is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from yamllint.config import YamlLintConfig
from yamllint.linter import run as lint

from tidegate.config import resolve

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OBJECTS = [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
LATEST = kubernetes_validate.latest_version()


def found(kind: str, name: str) -> dict[str, Any]:
    [one] = [o for o in OBJECTS if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return one


def container(name: str) -> dict[str, Any]:
    [one] = found("Deployment", name)["spec"]["template"]["spec"]["containers"]
    return one


def config_of(name: str) -> Any:
    """The only file of a ConfigMap, as Tidegate reads it."""
    [text] = found("ConfigMap", name)["data"].values()
    return resolve(tomllib.loads(text))


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", "--failure-threshold", "style", DEPLOY / "Dockerfile"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_yamllint_has_nothing_to_say(path: Path) -> None:
    rules = YamlLintConfig(file=str(DEPLOY / ".yamllint.yaml"))
    assert [str(problem) for problem in lint(path.read_text(encoding="utf-8"), rules)] == []


@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_objects_are_what_kubernetes_takes(one: dict[str, Any]) -> None:
    kubernetes_validate.validate(one, LATEST, strict=True)


def test_what_is_copied_is_there_and_in_the_context() -> None:
    copied = [part for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M) for part in line.split()[:-1]]
    assert len(copied) == 5
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"}
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name.removeprefix("./") in allowed


def test_the_image_installs_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = ",".join(re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE)).split(",")
    assert set(named) == {"serve", "gateway"}
    assert set(named) <= project["optional-dependencies"].keys()


class _Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def health() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), _Health) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


def test_the_health_check_tells_well_from_ill(health: HTTPServer) -> None:
    [command] = re.findall(r"^HEALTHCHECK .*\\\n\s+CMD (\[.*\])$", DOCKERFILE, re.M)
    _, *args = json.loads(command)

    def check() -> int:
        url = f"http://127.0.0.1:{health.server_port}/health"
        done = subprocess.run([sys.executable, *args], env={"HEALTH_URL": url}, capture_output=True, check=False)
        return done.returncode

    assert check() == 0
    _Health.status = 503
    try:
        assert check() != 0
    finally:
        _Health.status = 200


def test_the_gateway_finds_the_engines_by_their_headless_service() -> None:
    config = config_of("tidegate-gateway").gateway
    [dns] = config.discovery
    service = found("Service", dns.host)
    assert service["spec"]["clusterIP"] == "None"
    assert (dns.source, dns.kind, dns.port) == ("dns", "tidegate", service["spec"]["ports"][0]["port"])
    labels = found("Deployment", "tidegate-engine")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize(("deployment", "section"), [("tidegate-engine", "server"), ("tidegate-gateway", "gateway")])
def test_pods_run_what_their_configuration_says(deployment: str, section: str) -> None:
    said = getattr(config_of(deployment), section)
    pod = found("Deployment", deployment)["spec"]["template"]["spec"]
    runs = container(deployment)
    assert said.host == "0.0.0.0"
    assert said.port == runs["ports"][0]["containerPort"]
    [file] = found("ConfigMap", deployment)["data"]
    assert runs["args"][1:] == ["--config", f"/etc/tidegate/{file}"]
    waits = runs["lifecycle"]["preStop"]["sleep"]["seconds"] + said.drain_seconds
    assert pod["terminationGracePeriodSeconds"] > waits
    assert str(said.port) in re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.M)[0].split()


@pytest.mark.parametrize("deployment", ["tidegate-engine", "tidegate-gateway"])
def test_pods_may_do_no_more_than_they_must(deployment: str) -> None:
    pod = found("Deployment", deployment)["spec"]["template"]["spec"]
    runs = container(deployment)
    [user] = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.M)
    assert pod["securityContext"]["runAsUser"] == int(user) > 0
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert runs["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} <= runs["resources"]["requests"].keys()
    assert "memory" in runs["resources"]["limits"]
    assert {"readinessProbe", "livenessProbe"} <= runs.keys()
