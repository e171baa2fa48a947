"""A run on a cluster of this machine's, killed at random, worker, node and driver, until it is done; then compared with an undisturbed one.

    PYTHONPATH=tests python tests/soak/soak.py --folder /tmp/soak --shards 200 --every 4 --nodes 2

Prints a line for each kill and a summary at the end; exit code 0 says that every table has the same rows bit for bit, each row once,
and nothing in errors/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fakes import tiny_checkpoint
from tiny_jobs import same_tables, success, table, texts, words, write_input

COMMAND = [sys.executable, "-c", "import sys; from longscan.jobs.run import main; sys.exit(main())"]


class Soak:
    """One run under fire."""

    def __init__(self, folder: Path, *, shards: int, nodes: int, seed: int, repeat: int) -> None:
        """shards: row groups of three documents, of some thousand tokens each by `repeat`."""
        self.folder, self.random = folder, random.Random(seed)
        model = tiny_checkpoint(folder / "model", tokenizer=True)
        rows = [text * repeat for text in texts(3 * shards)]
        source = write_input(folder / "in.parquet", rows, row_group=3)
        windows = ("task=embed_score", "task.embedding.window_tokens=64", "task.score.window_tokens=64", "cluster.max_attempts=6")
        self.expected, self.output = folder / "undisturbed", folder / "out"
        sized = f"output.shard_tokens={max(len(row) for row in rows)}"
        self.jobs = {path: words(model, source, path, sized, *windows) for path in (self.expected, self.output)}
        self.num_nodes = nodes
        self.kills: Counter[str] = Counter()
        self.starts = 0

    def run(self, every_s: float, limit_s: float) -> bool:
        """Whether the run was complete within `limit_s`; with the tables as they must be, or an AssertionError."""
        subprocess.run([*COMMAND, *self.jobs[self.expected], "cluster=inprocess"], check=True, stderr=subprocess.DEVNULL)
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_BACKEND_LOG_LEVEL": "fatal"}
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes = [cluster.add_node(num_cpus=1) for _ in range(self.num_nodes)]
        try:
            done = self._under_fire(cluster, nodes, every_s, time.monotonic() + limit_s)
        finally:
            ray.shutdown()
            cluster.shutdown()
        if done:
            self.check()
        return done

    def check(self) -> None:
        same_tables(self.output, self.expected)
        assert table(self.output, "errors").num_rows == 0, "a healthy document was blamed"
        assert success(self.output)["documents"] == success(self.expected)["documents"]

    def _under_fire(self, cluster: Any, nodes: list[Any], every_s: float, end: float) -> bool:
        driver = self._start(cluster.address)
        while time.monotonic() < end:
            try:
                code = driver.wait(self.random.uniform(0.25, 1.75) * every_s)
            except subprocess.TimeoutExpired:
                driver = self._kill(driver, cluster, nodes)
                continue
            if code == 0:
                return True
            print(f"the driver ended with {code}: {(self.folder / 'said').read_text()[-600:]}", flush=True)
            if code != 75:
                return False
            driver = self._start(cluster.address)
        driver.kill()
        driver.wait()
        return False

    def _start(self, address: str) -> subprocess.Popen[bytes]:
        self.starts += 1
        words = [*self.jobs[self.output], "cluster=ray", f"cluster.address={address}", "cluster.workers=[1,2]", "cluster.cpus_per_worker=1"]
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen([*COMMAND, *words], stderr=said, stdout=said)

    def _kill(self, driver: subprocess.Popen[bytes], cluster: Any, nodes: list[Any]) -> subprocess.Popen[bytes]:
        what = self.random.choice(["worker", "worker", "node", "driver"])
        if what == "driver":
            driver.kill()
            driver.wait()
            driver = self._start(cluster.address)
        elif what == "node":
            victim = nodes.pop(self.random.randrange(len(nodes)))
            cluster.remove_node(victim, allow_graceful=False)
            nodes.append(cluster.add_node(num_cpus=1))
        else:
            pids = self._workers()
            if not pids:
                return driver
            os.kill(self.random.choice(pids), signal.SIGKILL)
        self.kills[what] += 1
        done = len(list((self.output / "_run" / "manifest").glob("*.json")))
        print(f"{time.strftime('%H:%M:%S')} killed a {what}; {done} shards are done", flush=True)
        return driver

    def _workers(self) -> list[int]:
        """Processes that have begun a shard and live."""
        begun = {json.loads(path.read_text() or "{}").get("pid") for path in (self.output / "_run" / "attempts").glob("*/??????")}
        return sorted(pid for pid in begun if pid and _is_worker(pid))


def _is_worker(pid: int) -> bool:
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="empty, or not there yet")
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=2, help="beside the head")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two kills, on average")
    parser.add_argument("--repeat", type=int, default=8, help="length of the documents")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(asked.folder, shards=asked.shards, nodes=asked.nodes, seed=asked.seed, repeat=asked.repeat)
    began = time.monotonic()
    done = soak.run(asked.every, asked.limit)
    attempts = len(list((soak.output / "_run" / "attempts").glob("*/??????")))
    print(
        f"{'complete and equal bit for bit' if done else 'not complete'} after {sum(soak.kills.values())} kills {dict(soak.kills)}, "
        f"{soak.starts} starts, {attempts} attempts at {asked.shards} row groups, {time.monotonic() - began:.0f} s"
    )
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
