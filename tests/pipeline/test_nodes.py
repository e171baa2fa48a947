"""Workers fit their machines: as many as there is room for, and none that no machine can hold."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from longscan.pipeline.config import ClusterConfig
from longscan.pipeline.errors import ConfigError
from longscan.pipeline.plan.nodes import Node, Workers, cores_here, size_workers


@pytest.mark.parametrize(
    ("mode", "nodes", "keys", "expected"),
    [
        ("inprocess", [Node(0, 8)], {}, Workers(1, 1, 8, 0)),
        ("inprocess", [Node(1, 8)], {}, Workers(1, 1, 8, 1)),
        ("inprocess", [Node(1, 8)], {"gpus_per_worker": 0, "cpus_per_worker": 3}, Workers(1, 1, 3, 0)),
        ("local", [Node(0, 2)], {}, Workers(1, 1, 2, 0)),
        ("local", [Node(0, 16)], {}, Workers(4, 4, 4, 0)),
        ("local", [Node(8, 128)], {}, Workers(8, 8, 16, 1)),
        ("local", [Node(8, 128)], {"gpus_per_worker": 2}, Workers(4, 4, 32, 2)),
        ("local", [Node(1, 16)], {"gpus_per_worker": 0.5}, Workers(2, 2, 8, 0.5)),
        ("local", [Node(0, 8)], {"workers": 2}, Workers(2, 2, 4, 0)),
        ("local", [Node(0, 2)], {"workers": 4}, Workers(4, 4, 1, 0)),
        ("local", [Node(0, 8)], {"workers": [1, 4]}, Workers(1, 4, 2, 0)),
        ("ray", [Node(0, 2), Node(0, 2), Node(0, 2)], {}, Workers(3, 3, 2, 0)),
        ("ray", [Node(0, 4), Node(4, 32), Node(2, 12)], {}, Workers(6, 6, 6, 1)),
        ("ray", [Node(0, 4)], {"workers": [1, 16], "gpus_per_worker": 1, "cpus_per_worker": 8}, Workers(1, 16, 8, 1)),
        ("ray", [Node(0, 4)], {"gpus_per_worker": 1}, Workers(1, 1, 4, 1)),
    ],
)
def test_workers(mode: str, nodes: list[Node], keys: dict[str, Any], expected: Workers) -> None:
    assert size_workers(ClusterConfig(mode=mode, **keys), nodes) == expected


@given(
    st.lists(st.builds(Node, st.integers(0, 8), st.integers(1, 64)), min_size=1, max_size=5),
    st.sampled_from(["auto", 1, 3, [1, 5]]),
)
def test_a_worker_of_automatic_size_fits_some_machine(nodes: list[Node], workers: Any) -> None:
    sized = size_workers(ClusterConfig(mode="ray", address="auto", workers=workers), nodes)
    assert 1 <= sized.least <= sized.most
    assert any(node.cores >= sized.cores and node.gpus >= sized.gpus for node in nodes)
    if workers == "auto":
        room = [min(int(n.cores) // sized.cores, int(n.gpus / sized.gpus) if sized.gpus else 1 << 30) for n in nodes]
        assert sized.most == max(1, sum(room))


@pytest.mark.parametrize(("key", "value"), [("gpus_per_worker", 2), ("cpus_per_worker", 16)])
@pytest.mark.parametrize("mode", ["inprocess", "local"])
def test_a_worker_larger_than_this_machine_is_told(mode: str, key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"cluster\.{key}: expected at most .*got {value}"):
        size_workers(ClusterConfig(mode=mode, **{key: value}), [Node(1, 8)])


def test_this_machine_has_cores() -> None:
    assert cores_here() >= 1
