"""Where workers can run, and what is asked there before any is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from longscan.pipeline.cluster.connection import told
from longscan.pipeline.config import JobConfig
from longscan.pipeline.plan.nodes import Node, cores_here

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


def nodes_of(config: JobConfig) -> list[Node]:
    """The machines that workers can run on, as they are now."""
    if config.cluster.mode != "ray":
        return [Node(torch.cuda.device_count(), cores_here())]
    import ray

    there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Node(node.get("GPU", 0), node["CPU"]) for node in there if node.get("CPU")] or [Node(0, 1)]


def on_a_worker(config: JobConfig, gpus: float, ask: Callable[..., Answer], *arguments: Any) -> Answer:
    """`ask(*arguments)` where workers will run: on a cluster, this process may have no GPU when they do."""
    if config.cluster.mode != "ray":
        return ask(*arguments)
    import ray

    if gpus > max(node.gpus for node in nodes_of(config)):
        log.warning("no node of the cluster has %g GPUs now; waiting until one comes", gpus)
    with told():
        answer: Answer = ray.get(ray.remote(num_cpus=0, num_gpus=gpus)(ask).remote(*arguments))
    return answer
