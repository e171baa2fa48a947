"""A run on a cluster of this machine's, killed at random, worker, node and driver, until it is done; then compared with an undisturbed one.

    PYTHONPATH=tests python tests/soak/soak.py --folder /tmp/soak --shards 200 --every 4 --kills 100

Prints a line for each kill and a summary at the end. Exit code 0 says that every table has the same rows bit for bit, each row once,
nothing in errors/; that of no document more than an interval between carries was computed again at a kill, and no finished one, both by
the run's metrics and by a witness beside the engines; and that there were as many kills as were asked for, of which most hit shards.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fakes import tiny_checkpoint
from tiny_jobs import SENTENCE, same_tables, success, table, texts, words, write_input
from witness import FOLDER, RATE, Evidence, read_notes

HERE = Path(__file__).parent
ROWS = 3
"""Of a shard: a long document, of which several carries are made, and two short ones."""
INTERVAL = 512
"""engine.checkpoint_tokens."""
POLL_S = 0.4
TOKEN = secrets.token_hex(32)
"""Of all clusters of this process, which remembers the first it is told."""


class Soak:
    """One run under fire."""

    def __init__(self, folder: Path, *, shards: int, nodes: int, seed: int, length: int, rate: float) -> None:
        """length: of the long documents in bytes; a token has about two. rate: tokens/s of a worker."""
        self.folder, self.random, self.shards = folder, random.Random(seed), shards
        model = tiny_checkpoint(folder / "model", tokenizer=True)
        source = write_input(folder / "in.parquet", _rows(shards, length), row_group=ROWS)
        windows = ("task=embed_score", "task.embedding.window_tokens=64", "task.score.window_tokens=64")
        # A row group alone is more than half a shard, and less than four.
        sizes = (f"engine.checkpoint_tokens={INTERVAL}", f"output.shard_tokens={length // 4}")
        self.expected, self.output, self.notes = folder / "undisturbed", folder / "out", folder / "notes"
        self.notes.mkdir()
        self.jobs = {path: words(model, source, path, *sizes, *windows) for path in (self.expected, self.output)}
        self.environment = {FOLDER: str(self.notes), RATE: str(rate), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path[1:]])}
        self.num_nodes = nodes
        self.nodes: list[Any] = []
        self.kills: Counter[str] = Counter()
        self.hits = 0
        self.drivers: list[subprocess.Popen[bytes]] = []

    def run(self, every_s: float, limit_s: float) -> bool:
        """Whether the run was complete within `limit_s`; with the tables as they must be, or an AssertionError."""
        with self.cluster():
            done = self._under_fire(every_s, time.monotonic() + limit_s)
        if done:
            self.check()
        return done

    @contextmanager
    def cluster(self) -> Iterator[None]:
        """Behind the undisturbed run: while it lasts, there is a cluster, of a head and `nodes`, each with room for a worker."""
        undisturbed = [sys.executable, "-m", "longscan.jobs.run", *self.jobs[self.expected], "cluster=inprocess"]
        subprocess.run(undisturbed, check=True, stderr=subprocess.DEVNULL)
        assert success(self.expected)["shards"] == self.shards
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_BACKEND_LOG_LEVEL": "fatal"}
        os.environ |= self.environment
        import ray
        from ray._private.authentication_test_utils import reset_auth_token_state
        from ray.cluster_utils import Cluster

        reset_auth_token_state()  # a process that has been part of a cluster before goes on asking for what was there then
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            for _ in range(self.num_nodes):
                self.add_node()
            yield
        finally:
            for driver in self.drivers:
                driver.kill()
                driver.wait()
            ray.shutdown()
            self._cluster.shutdown()

    def check(self) -> None:
        same_tables(self.output, self.expected)
        assert table(self.output, "errors").num_rows == 0, "a healthy document was blamed"
        assert success(self.output)["documents"] == success(self.expected)["documents"] == ROWS * self.shards
        run, evidence = self.metrics(), self.evidence()
        print(f"metrics of all starts: {json.dumps(run)}", flush=True)
        again = evidence.again or [0]
        print(
            f"witness: {evidence.computed} tokens computed for {success(self.expected)['tokens']}; {evidence.resumed} times a document "
            f"went on behind its beginning; {sum(again)} tokens again, at most {max(again)} of a document at once",
            flush=True,
        )
        assert (run["shards"], run["shards_left"]) == (self.shards, 0)
        assert run["tokens"] == success(self.expected)["tokens"]
        assert run["carries"]["most_recomputed_tokens"] <= INTERVAL
        assert max(again) <= INTERVAL
        assert not evidence.finished_again, "documents that were finished were computed again"

    def metrics(self) -> dict[str, Any]:
        run: dict[str, Any] = json.loads((self.output / "_run" / "metrics.json").read_text())["run"]
        return run

    def evidence(self) -> Evidence:
        return read_notes(self.notes, ROWS)

    def start(self) -> None:
        """Start the command, or start it again."""
        where = ("cluster=ray", f"cluster.address={self._cluster.address}", "cluster.workers=[1,2]", "cluster.cpus_per_worker=1")
        with (self.folder / "said").open("wb") as said:
            command = [sys.executable, HERE / "driver.py", *self.jobs[self.output], *where]
            self.drivers.append(subprocess.Popen(command, stderr=said, stdout=said))

    def ended(self, timeout_s: float) -> bool:
        """Whether the run is complete `timeout_s` from now; where a start ended with 75, there is another then."""
        try:
            code = self.drivers[-1].wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if code == 0:
            return True
        said = (self.folder / "said").read_text()[-600:]
        print(f"the driver ended with {code}: {said}", flush=True)
        assert code == 75, said
        self.start()
        return False

    def add_node(self) -> None:
        self.nodes.append(self._cluster.add_node(num_cpus=1))

    def kill(self, what: str) -> bool:
        """Kill a "worker" that is at work, a "node", or the "driver", and set another in its place. Whether that hit somebody at work."""
        working = self.working()
        if what == "worker" and not working:
            return False  # it has ended by itself meanwhile
        if what == "driver":
            self.drivers[-1].kill()
            self.drivers[-1].wait()
            self.start()
        elif what == "node":
            self._cluster.remove_node(self.nodes.pop(self.random.randrange(len(self.nodes))), allow_graceful=False)
            self.add_node()
        else:
            os.kill(self.random.choice(working), signal.SIGKILL)
            time.sleep(0.1)
        self.kills[what] += 1
        hit = bool(working) and (what == "driver" or any(not _is_worker(pid) for pid in working))
        self.hits += hit
        done = len(list((self.output / "_run" / "manifest").glob("*.json")))
        print(f"{time.strftime('%H:%M:%S')} killed a {what}{'' if hit else ', nobody at work'}; {done} shards are done", flush=True)
        return hit

    def _under_fire(self, every_s: float, end: float) -> bool:
        """Of ten kills nine wait until somebody is at work; the tenth hits whatever there is: a start, a plan, nothing."""
        self.start()
        at, patient = 0.0, True
        while time.monotonic() < end:
            if self.ended(POLL_S):
                return True
            if patient and not self.working():
                at = 0.0
            elif not at:
                at = time.monotonic() + self.random.uniform(0.25, 1.75) * every_s
            elif time.monotonic() >= at:
                self.kill(self.random.choice(["worker", "worker", "node", "driver"] if self.working() else ["node", "driver"]))
                at, patient = 0.0, self.random.random() < 0.9
        return False

    def working(self) -> list[int]:
        """Processes that have begun a shard and live."""
        begun = {json.loads(path.read_text() or "{}").get("pid") for path in (self.output / "_run" / "attempts").glob("*/??????")}
        return sorted(pid for pid in begun if pid and _is_worker(pid))


def _rows(shards: int, length: int) -> list[str]:
    short = texts(2 * shards)
    long = [(f"{n} {SENTENCE} " * (length // len(SENTENCE) + 1))[:length] for n in range(shards)]
    return [row for n in range(shards) for row in (short[2 * n], long[n], short[2 * n + 1])]


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
    parser.add_argument("--length", type=int, default=6000, help="of the long documents, one a shard, in bytes")
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens/s of a worker, which sleeps for the rest")
    parser.add_argument("--kills", type=int, default=0, help="fewer than so many are no success")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(asked.folder, shards=asked.shards, nodes=asked.nodes, seed=asked.seed, length=asked.length, rate=asked.rate)
    began = time.monotonic()
    done = soak.run(asked.every, asked.limit)
    attempts = len(list((soak.output / "_run" / "attempts").glob("*/??????")))
    kills = sum(soak.kills.values())
    print(
        f"{'complete and equal bit for bit' if done else 'not complete'} after {kills} kills {dict(soak.kills)}, {soak.hits} of them of "
        f"somebody at work, {len(soak.drivers)} starts, {attempts} attempts at {asked.shards} shards, {time.monotonic() - began:.0f} s"
    )
    return 0 if done and kills >= asked.kills else 1


if __name__ == "__main__":
    sys.exit(main())
