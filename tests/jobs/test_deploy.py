"""The manifests for a cluster say what the command understands and what KubeRay knows."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from longscan.jobs.compose import compose_job
from longscan.pipeline.plan.nodes import Node, size_workers
from longscan.pipeline.rules import validate

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "jobs" / "deploy"


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text("utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    found: dict[str, Any] = job["spec"]
    return found


def test_the_entrypoint_is_a_valid_job(spec: dict[str, Any]) -> None:
    command, *words = shlex.split(spec["entrypoint"])
    assert command == "longscan"
    config = compose_job(words)
    validate(config)
    assert (config.cluster.mode, config.cluster.address) == ("ray", "auto")
    assert config.output.path.startswith("s3://")


def test_workers_fit_their_pods_and_the_pool_its_group(spec: dict[str, Any]) -> None:
    config = compose_job(shlex.split(spec["entrypoint"])[1:])
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert container["resources"]["requests"] == limits
    workers = size_workers(config.cluster, [Node(int(limits["nvidia.com/gpu"]), int(limits["cpu"]))])
    assert workers.cores <= int(limits["cpu"])
    assert workers.gpus <= int(limits["nvidia.com/gpu"])
    assert [workers.least, workers.most] == [group["minReplicas"], group["maxReplicas"]]


def test_it_ends_and_cleans_up(spec: dict[str, Any]) -> None:
    assert spec["backoffLimit"] >= 1
    assert spec["activeDeadlineSeconds"] > 0
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] >= 0


def test_every_pod_has_the_image_and_the_model(spec: dict[str, Any]) -> None:
    config = compose_job(shlex.split(spec["entrypoint"])[1:])
    cluster = spec["rayClusterSpec"]
    for pod in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = pod["template"]["spec"]["containers"]
        assert container["image"] == "longscan"
        (mount,) = container["volumeMounts"]
        assert Path(config.model.path).is_relative_to(mount["mountPath"])
        assert mount["name"] in {volume["name"] for volume in pod["template"]["spec"]["volumes"]}


def test_the_image_has_the_versions_that_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    python = re.search(r"^FROM python:(\d+\.\d+)", text, re.M)
    assert python is not None
    assert project["requires-python"] == f">={python[1]}"
    asked = next(line for line in project["dependencies"] if line.startswith("ray["))
    assert asked.partition(">=")[2] in text
