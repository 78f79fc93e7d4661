"""The files of deploy/: only fields that we know, values of their types, and names that fit together.

The schema below holds the fields we use and no other, so a misspelt one is an error; written from the reference
of KubeRay's `ray.io/v1` and of Kubernetes.
"""

import copy
import json
from pathlib import Path

import pytest
import yaml

from packsvc.config import load_job

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"

CONTAINER = {
    "name": str,
    "image": str,
    "resources": {"requests": {"cpu": str, "memory": str}, "limits": {"cpu": str, "memory": str}},
    "envFrom": [{"secretRef": {"name": str, "optional": bool}}],
    "volumeMounts": [{"name": str, "mountPath": str}],
}
POD = {
    "spec": {"containers": [CONTAINER], "volumes": [{"name": str, "configMap": {"name": str}}], "nodeSelector": dict}
}
START = {"num-cpus": str, "object-store-memory": str}
RAYJOB = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata": {"name": str},
    "spec": {
        "entrypoint": str,
        "entrypointNumCpus": (int, float),
        "backoffLimit": int,
        "submitterConfig": {"backoffLimit": int},
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec": {
            "rayVersion": str,
            "authOptions": {"mode": "token"},
            "enableInTreeAutoscaling": bool,
            "autoscalerOptions": {"idleTimeoutSeconds": int},
            "headGroupSpec": {"rayStartParams": START, "template": POD},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": START,
                    "template": POD,
                }
            ],
        },
    },
}
SERVICE = {
    "image": str,
    "build": {"context": str, "dockerfile": str},
    "environment": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str},
    "secrets": [str],
    "volumes": [str],
    "command": str,
    "ports": [str],
    "depends_on": [str],
}
COMPOSE = {
    "x-ray": SERVICE,
    "services": {"head": SERVICE, "worker": SERVICE},
    "secrets": {"ray-token": {"file": str}},
}


def check(value, schema, where=""):
    """Raise where a value has a field or a type that the schema does not know."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), f"{where} must be a mapping"
        for key, inner in value.items():
            assert key in schema, f"{where}.{key} is unknown"
            check(inner, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), f"{where} must be a list"
        for number, inner in enumerate(value):
            check(inner, schema[0], f"{where}.{number}")
    elif isinstance(schema, str):
        assert value == schema, f"{where} must be {schema}"
    else:
        kinds = schema if isinstance(schema, tuple) else (schema,)
        assert type(value) in kinds, f"{where} is {type(value).__name__}"


def read(name):
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def apply_patch(tree, operations):
    """JSON patch, as far as the overlays use it."""
    tree = copy.deepcopy(tree)
    for step in operations:
        *path, last = step["path"].strip("/").split("/")
        at = tree
        for key in path:
            at = at[int(key)] if isinstance(at, list) else at[key]
        assert step["op"] == "add" or last in at, f"{step['path']} is not there"
        at[last] = step["value"]
    return tree


def overlays():
    return sorted(p.parent.name for p in (DEPLOY / "k8s" / "overlays").glob("*/kustomization.yaml"))


def rayjobs():
    base = read("k8s/base/rayjob.yaml")
    yield "base", base
    for name in overlays():
        tree = read(f"k8s/overlays/{name}/kustomization.yaml")
        assert tree["resources"] == ["../../base"]
        (patch,) = tree["patches"]
        assert patch["target"] == {"kind": "RayJob", "name": base["metadata"]["name"]}
        yield name, apply_patch(base, yaml.safe_load(patch["patch"]))


@pytest.mark.parametrize(("name", "job"), list(rayjobs()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_ray_job_has_known_fields_and_names_that_fit(name, job):
    check(job, RAYJOB)
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    config_maps = {m["name"] for m in read("k8s/base/kustomization.yaml")["configMapGenerator"]}
    secret = read("k8s/secrets.example.yaml")["metadata"]["name"]
    for pod in [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]:
        volumes = {v["name"]: v["configMap"]["name"] for v in pod["spec"]["volumes"]}
        assert set(volumes.values()) <= config_maps
        for container in pod["spec"]["containers"]:
            assert {m["name"] for m in container["volumeMounts"]} <= set(volumes)
            assert [e["secretRef"]["name"] for e in container["envFrom"]] == [secret]
            assert container["resources"]["requests"] == container["resources"]["limits"]
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_a_misspelt_field_and_a_wrong_type_are_caught():
    job = read("k8s/base/rayjob.yaml")
    for change in ({"entrypointNumCPUs": 0}, {"backoffLimit": "3"}):
        wrong = {**job, "spec": {**job["spec"], **change}}
        with pytest.raises(AssertionError, match=next(iter(change))):
            check(wrong, RAYJOB)


def test_the_entrypoint_is_a_command_of_packsvc_and_the_job_file_is_one(monkeypatch):
    words = read("k8s/base/rayjob.yaml")["spec"]["entrypoint"].split()
    assert words == ["packsvc", "pack", "/job/job.yaml", "--address", "auto"]
    job = load_job(DEPLOY / "k8s" / "base" / "job.yaml")
    assert all("://" in path for source in job.sources for path in source.paths)
    assert "://" in job.output_url


def test_compose_has_known_fields_and_its_dashboard_is_on_loopback_only():
    tree = read("compose.yaml")
    check(tree, COMPOSE)
    assert [p for s in tree["services"].values() for p in s.get("ports", [])] == ["127.0.0.1:8265:8265"]


def test_one_version_of_ray_everywhere():
    version = read("k8s/base/rayjob.yaml")["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray[default]=={version}" in (DEPLOY / "Dockerfile").read_text()


def test_no_secret_is_real():
    secret = read("k8s/secrets.example.yaml")
    assert json.dumps(secret).count("replace-me") == 2
    assert "deploy/ray-token" in (DEPLOY.parent / ".gitignore").read_text()
