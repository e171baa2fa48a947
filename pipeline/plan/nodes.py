"""What there is to run on, and how many workers of which size it takes. Pure, but for a look at this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from longscan.pipeline.config import ClusterConfig
from longscan.pipeline.errors import ConfigError

CORES_A_WORKER = 4
"""Where there are no GPUs: products of one step gain little from more."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that workers can run on."""

    gpus: float
    cores: float


@dataclass(frozen=True, slots=True)
class Workers:
    """The pool that a run asks for."""

    least: int
    most: int
    cores: int
    """Of a worker."""
    gpus: float
    """Of a worker: 0 runs it on the CPU."""


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def size_workers(cluster: ClusterConfig, nodes: Sequence[Node]) -> Workers:
    """Workers for these machines, "auto" replaced by what fills them: one a GPU, else one for every few cores.

    In this process there is one. Raises ConfigError where one worker is larger than any machine, except on a cluster, which may
    still grow.
    """
    gpus = float(any(node.gpus for node in nodes)) if cluster.gpus_per_worker == "auto" else float(cluster.gpus_per_worker)
    if cluster.mode != "ray":
        _check_at_most("gpus_per_worker", gpus, max(node.gpus for node in nodes))
    usable = [node for node in nodes if node.gpus >= gpus] or [Node(gpus, max(node.cores for node in nodes))]
    most_cores = max(1, int(max(node.cores for node in usable)))
    cores = cluster.cpus_per_worker
    if cores == "auto":
        cores = most_cores if cluster.mode == "inprocess" else min(most_cores, max(1, _share(cluster, usable, gpus)))
    if cluster.mode != "ray":
        _check_at_most("cpus_per_worker", cores, most_cores)
    if cluster.mode == "inprocess":
        return Workers(1, 1, cores, gpus)
    number = cluster.workers if cluster.workers != "auto" else max(1, sum(_fit(node, cores, gpus) for node in usable))
    least, most = number if isinstance(number, list) else (number, number)
    return Workers(least, most, cores, gpus)


def _share(cluster: ClusterConfig, nodes: Sequence[Node], gpus: float) -> int:
    """Cores of a worker so that every machine holds as many workers as it can."""
    if cluster.workers != "auto":
        most = cluster.workers[1] if isinstance(cluster.workers, list) else cluster.workers
        return int(sum(node.cores for node in nodes)) // int(most)
    return min(int(node.cores * gpus / node.gpus) for node in nodes) if gpus else CORES_A_WORKER


def _fit(node: Node, cores: int, gpus: float) -> int:
    by_cores = int(node.cores) // cores
    return min(by_cores, int(node.gpus / gpus)) if gpus else by_cores


def _check_at_most(key: str, asked: float, there: float) -> None:
    if asked > there:
        raise ConfigError(f"cluster.{key}: expected at most {there:g}, which this machine has, got {asked:g}")
