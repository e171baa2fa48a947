"""A run in this process, on Ray on this machine, and on a cluster: the same tables bit for bit, and each row once whatever dies."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import saboteurs
import sigterm
from guarded import guarded
from longscan.jobs.compose import compose_job
from longscan.jobs.run import main
from longscan.pipeline.cluster.connection import connect, until_left
from longscan.pipeline.errors import OutputError
from longscan.pipeline.output.folder import RunFolder
from longscan.pipeline.plan.planner import Plan
from longscan.pipeline.run import run
from longscan.pipeline.shards import ShardReport
from longscan.pipeline.worker.job import EngineBuilder
from processes import status
from stopping import Stop, carries, stopped
from tiny_jobs import rows, success, table, texts, unfinish, words, write_input
from waiting import Until, beside, until

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, on import and at its end


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve row groups; one row is an error."""
    return write_input(tmp_path_factory.mktemp("in") / "in.parquet", [*(text * 3 for text in texts(23)), None], row_group=2)


def job(model: Path, source: Path, output: Path, *more: str) -> list[str]:
    """Twelve shards, each a chain of its own."""
    windows = ("task=embed_score", "task.embedding.window_tokens=64", "task.score.window_tokens=64", "max_errors=1")
    return words(model, source, output, "output.shard_tokens=800", *windows, *more)


@pytest.fixture(scope="module")
def alone(model: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run in this process."""
    output = tmp_path_factory.mktemp("alone") / "out"
    assert main(job(model, source, output, "cluster=inprocess")) == 0
    assert success(output)["shards"] == 12
    return output


@pytest.fixture(scope="module", autouse=True)
def token() -> Iterator[None]:
    """Clusters of this module ask for a token of their own, not for one that lies in the home folder, or for none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster of one node, on loopback, for this module alone."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(sys.executable).with_name("ray"))
    settings = ("--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4", "--include-dashboard=false")
    log = tmp_path_factory.mktemp("ray") / "log"
    paths = os.pathsep.join([str(Path(saboteurs.__file__).parent), os.environ.get("PYTHONPATH", "")])
    with guarded([script, "start", *settings], log, {"RAY_BACKEND_LOG_LEVEL": "fatal", "PYTHONPATH": paths}) as head:
        until(lambda: "started" in log.read_text(), head)
        yield f"127.0.0.1:{port}"


def assert_same(output: Path, expected: Path) -> None:
    """Windows come as segments end: in order within a document, but documents in any."""
    order = {"windows": [("doc_id", "ascending"), ("window_index", "ascending")]}
    for name in ("documents", "windows", "errors"):
        found, wanted = table(output, name), table(expected, name)
        if name in order:
            found, wanted = found.sort_by(order[name]), wanted.sort_by(order[name])
        assert found.num_rows > 0, name
        assert found.equals(wanted), name


def attempts(output: Path) -> list[Path]:
    """Not what stands beside them: how one ended, where it was, and for a moment a temporary file."""
    return sorted((output / "_run" / "attempts").glob("*/??????"))


def at_work(output: Path) -> set[int]:
    """Processes that have begun a shard."""
    return {json.loads(path.read_text())["pid"] for path in attempts(output)}


def committed(output: Path) -> int:
    return len(list((output / "_run" / "manifest").glob("*.json")))


def test_on_ray_on_this_machine(alone: Path, model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(job(model, source, tmp_path / "out", "cluster=local", "cluster.workers=2")) == 0
    assert_same(tmp_path / "out", alone)
    workers = {json.loads(path.read_text())["pid"] for path in attempts(tmp_path / "out")}
    assert 1 <= len(workers) <= 2, "a worker that is ready late finds nothing left"
    assert os.getpid() not in workers
    said = json.loads((tmp_path / "out" / "_run" / "metrics.json").read_text())
    assert said["workers_at_work"] == len(workers)
    assert said["worker_seconds"] / len(workers) <= said["longest_worker_seconds"] <= said["worker_seconds"]
    assert "12 of 12 shards, 23 documents, 1 error" in capsys.readouterr().err


def test_ray_on_this_machine_starts_no_processes_for_tasks_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it starts one a core, and the actors come behind them: seconds on a large machine."""
    import ray

    def parent() -> int:
        return os.getppid()

    monkeypatch.setattr(os, "cpu_count", lambda: 12)  # Ray starts no more of them at once than there are cores
    with until_left(connect(address="local", num_cpus=12, include_dashboard=False)):
        raylet = ray.get(ray.remote(parent).remote())
        found = [status(path.name) for path in Path("/proc").glob("[0-9]*")]
    parents = [int(of_one[1]) for of_one in found if of_one]
    assert 1 <= parents.count(raylet) <= 6, "the task's, and those that look after the node"


@pytest.mark.parametrize("workers", [1, 4])
def test_any_number_of_workers_and_any_order_of_shards(
    alone: Path, model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A shard a row, so that four workers have more than they can take at once: each waits until all of them are at work."""
    output = tmp_path / "out"
    single = write_input(tmp_path / "in" / "in.parquet", pq.read_table(source)["text"].to_pylist(), row_group=1)
    monkeypatch.setattr("longscan.pipeline.run.longest_first", lambda chains: random.Random(workers).sample(chains, len(chains)))
    command = [*job(model, single, output), "output.shard_tokens=64", f"cluster={'local' if workers > 1 else 'inprocess'}"]
    if workers == 1:
        assert main(command) == 0
    else:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(saboteurs.__file__).parent), os.environ.get("PYTHONPATH", "")]))

        def go_on(until: Until) -> None:
            try:
                until(lambda: len(at_work(output)) == workers)
            finally:
                saboteurs.go_on(output).touch()

        with beside(go_on):
            run(
                compose_job([*command, f"cluster.workers={workers}", "cluster.cpus_per_worker=1"]),
                build=saboteurs.held_behind_nothing,
            )
        assert len(at_work(output)) == workers
    assert success(output)["shards"] == 24
    assert_same(output, alone)


@pytest.fixture
def starve() -> Iterator[Callable[[int], None]]:
    """Puts a process where it gets no memory any more, so that the system ends it at the next page that it asks for."""
    root = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    group = root / f"longscan-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
        limit.write_text(str(1 << 20))
    except (OSError, StopIteration) as error:
        pytest.skip(f"only root can give a process less memory: {error!r}")
    yield lambda pid: (group / "cgroup.procs").write_text(str(pid)) and None
    until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.mark.parametrize("how", ["killed", pytest.param("out_of_memory", marks=pytest.mark.slow)])
def test_on_a_cluster_whose_worker_is_killed(
    alone: Path, address: str, model: Path, source: Path, tmp_path: Path, how: str, request: pytest.FixtureRequest
) -> None:
    output, killed = tmp_path / "out", []
    end: Callable[[int], None] = (lambda pid: os.kill(pid, signal.SIGKILL)) if how == "killed" else request.getfixturevalue("starve")

    def kill(until: Until) -> None:
        until(lambda: committed(output) >= 1)
        pid = json.loads(attempts(output)[-1].read_text())["pid"]
        assert b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
        end(pid)
        killed.append(committed(output))
        saboteurs.go_on(output).touch()

    command = job(model, source, output, "cluster=ray", f"cluster.address={address}", "cluster.workers=1")
    with beside(kill):
        run(compose_job(command), build=saboteurs.held_behind_a_shard)
    assert killed[0] < 12, "it was killed too late to lose anything"
    assert_same(output, alone)
    assert len({json.loads(path.read_text())["pid"] for path in attempts(output)}) == 2, "another process went on"


def test_a_hang_and_a_device_that_fails_start_workers_anew_and_cost_one_document(
    alone: Path, model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(saboteurs.MARK, str(tmp_path / "mark"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(saboteurs.__file__).parent), os.environ.get("PYTHONPATH", "")]))
    more = ("cluster=local", "cluster.workers=1", "cluster.cpus_per_worker=1", "cluster.hang_s=1", "cluster.max_attempts=2", "max_errors=2")
    run(compose_job(job(model, source, tmp_path / "out", *more)), build=saboteurs.sabotaged)
    assert (tmp_path / "mark").exists(), "it hung"
    errors = rows(tmp_path / "out", "errors")
    assert [(row["row"], row["stage"], row["error"]) for row in errors] == [(4, "engine", "WorkerKilled"), (23, "read", "NullText")]
    assert rows(tmp_path / "out", "documents") == [row for n, row in enumerate(rows(alone, "documents")) if n != 4]


@pytest.mark.slow
def test_a_device_that_is_lost_costs_a_start_of_its_worker_and_nobody_is_blamed(
    alone: Path, model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(saboteurs.MARK, str(tmp_path / "mark"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(saboteurs.__file__).parent), os.environ.get("PYTHONPATH", "")]))
    more = ("cluster=local", "cluster.workers=1", "cluster.cpus_per_worker=1")
    run(compose_job(job(model, source, tmp_path / "out", *more)), build=saboteurs.poisoned)
    assert (tmp_path / "mark").exists()
    assert len(at_work(tmp_path / "out")) == 2
    assert_same(tmp_path / "out", alone)


def hold(patch: pytest.MonkeyPatch, build: EngineBuilder) -> None:
    """The command's engines are made by `build`, which holds them; each goes on when it is told to stop."""
    patch.setattr("longscan.pipeline.run.run", partial(run, build=build))


def test_on_a_cluster_that_is_told_to_stop(
    alone: Path,
    address: str,
    model: Path,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out"
    hold(monkeypatch, saboteurs.held_behind_a_shard)

    def stop(until: Until) -> None:
        until(lambda: committed(output) >= 1)
        sigterm.send()

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # a signal to a run that has failed fails the test, and does not end all tests
    try:
        with beside(stop):
            code = main(job(model, source, output, "cluster=ray", f"cluster.address={address}", "cluster.workers=[1,2]"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 75
    assert "longscan: error: stopped; what is done is kept" in capsys.readouterr().err
    assert 1 <= committed(output) < 12
    monkeypatch.undo()
    assert main(job(model, source, output, "cluster=inprocess")) == 0
    assert_same(output, alone)


def test_a_worker_that_cannot_start_is_told_in_a_line(
    address: str, model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [word for word in job(model, source, tmp_path / "out") if not word.startswith("engine.lanes")]
    assert main([*base, "cluster=ray", f"cluster.address={address}", "cluster.workers=1", "engine.lanes=1000000000"]) == 2
    said = capsys.readouterr().err
    assert "longscan: error: the model in float32 with 1000000000 lanes" in said
    assert "Traceback" not in said


def test_a_cluster_that_is_not_there_is_told_at_once(model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))  # and does not listen; nor can anybody else there
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
        assert main(job(model, source, tmp_path / "out", "cluster=ray", f"cluster.address={nobody}")) == 2
    said = capsys.readouterr().err
    assert "cluster.address: expected the address of a running Ray cluster" in said
    assert nobody in said
    assert not (tmp_path / "out").exists()


class TestInThisProcess:
    def test_a_shard_that_fails_does_not_stop_the_others(
        self, alone: Path, model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder stands where the documents of shard 4 belong."""
        monkeypatch.setattr("longscan.pipeline.worker.worker.TRIES", 1)
        output, wall = tmp_path / "out", tmp_path / "out" / "documents" / "part-00004-of-00012.parquet" / "wall"
        true_start = RunFolder.start

        def start(folder: RunFolder, plan: Plan) -> None:
            true_start(folder, plan)
            wall.mkdir(parents=True)

        monkeypatch.setattr(RunFolder, "start", start)
        code = main(job(model, source, output, "cluster=inprocess"))
        said = capsys.readouterr().err
        assert code == 75, said
        assert "1 of 12 shards failed, the first of them shard 4: OutputError" in said
        assert "part-00004-of-00012.parquet" in said
        assert "run the same command again" in said
        assert "Traceback" not in said
        assert committed(output) == 11
        wall.rmdir()
        wall.parent.rmdir()
        assert main(job(model, source, output, "cluster=inprocess")) == 0
        assert_same(output, alone)

    def test_a_fault_of_the_program_fails_its_shard_alone(
        self, model: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from longscan.pipeline.worker import worker

        true_journey = worker.process_shard

        def faulty(shard: object, tools: object, attempt: object) -> object:
            if getattr(shard, "index", None) == 2:
                raise ZeroDivisionError("a fault")
            return true_journey(shard, tools, attempt)  # type: ignore[arg-type]

        monkeypatch.setattr(worker, "process_shard", faulty)
        assert main(job(model, source, tmp_path / "out", "cluster=inprocess")) == 75
        assert "shard 2: ZeroDivisionError: a fault" in capsys.readouterr().err
        assert committed(tmp_path / "out") == 11
        monkeypatch.undo()
        assert main(job(model, source, tmp_path / "out", "cluster=inprocess")) == 0
        assert len(rows(tmp_path / "out", "documents")) == 23

    def test_a_row_group_in_several_shards_is_one_chain(self, alone: Path, model: Path, tmp_path: Path) -> None:
        whole = write_input(tmp_path / "in.parquet", [*(text * 3 for text in texts(23)), None])
        assert main(job(model, whole, tmp_path / "out", "cluster=inprocess")) == 0
        assert success(tmp_path / "out")["shards"] > 4
        assert_same(tmp_path / "out", alone)

    def test_the_longest_documents_begin_first(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A row group each, the giant's the last: its shard is the first that a worker gets."""
        from longscan.pipeline import run as module

        single = write_input(tmp_path / "in.parquet", [*texts(8), "a" * 20_000], row_group=1)
        given: list[int] = []
        start = module._in_process

        def noted(job: Any, workers: Any, chains: Any, progress: Any) -> Any:
            given.extend(shard.index for chain in chains for shard in chain)
            return start(job, workers, chains, progress)

        monkeypatch.setattr(module, "_in_process", noted)
        assert main([*job(model, single, tmp_path / "out", "cluster=inprocess"), "output.shard_tokens=64"]) == 0
        assert len(given) > 4
        assert given[0] == max(given)

    def test_what_a_worker_did_is_told_by_a_shard_of_its_chain_that_was_done_before(self, model: Path, tmp_path: Path) -> None:
        whole = write_input(tmp_path / "in.parquet", [*(text * 3 for text in texts(23)), None])
        command = job(model, whole, tmp_path / "out", "cluster=inprocess")
        assert main(command) == 0
        unfinish(tmp_path / "out", success(tmp_path / "out")["shards"] - 1)
        assert main(command) == 0
        said = json.loads((tmp_path / "out" / "_run" / "metrics.json").read_text())
        assert (said["shards"], said["workers_at_work"]) == (1, 1)

    def test_a_finished_shard_of_a_chain_that_cannot_be_looked_up_is_told_of(
        self, alone: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is no shard that was left to do, and its failure is no less one."""
        from longscan.pipeline.worker import worker

        whole = write_input(tmp_path / "in.parquet", [*(text * 3 for text in texts(23)), None])
        command = job(model, whole, tmp_path / "out", "cluster=inprocess")
        assert main(command) == 0
        unfinish(tmp_path / "out", success(tmp_path / "out")["shards"] - 1)
        true_report_of = worker.report_of

        def away(output: Any, shard: int) -> ShardReport | None:
            if shard == 0:
                raise OutputError("the manifest is away")
            return true_report_of(output, shard)

        monkeypatch.setattr(worker, "report_of", away)
        monkeypatch.setattr(worker, "TRIES", 1)
        capsys.readouterr()
        assert main(command) == 75
        assert "the first of them shard 0: OutputError: the manifest is away" in capsys.readouterr().err
        monkeypatch.undo()
        assert main(command) == 0
        assert_same(tmp_path / "out", alone)


def test_workers_keep_what_they_are_at_when_the_run_is_stopped(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an interval that no document reaches, every carry there is comes from the stop."""
    source = write_input(tmp_path / "in.parquet", [" ".join(texts(40, seed=n)) for n in range(4)], row_group=2)
    command = job(model, source, tmp_path / "out", "engine.checkpoint_tokens=1048576")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(saboteurs.__file__).parent), os.environ.get("PYTHONPATH", "")]))
    with monkeypatch.context() as patch:
        hold(patch, saboteurs.held_behind_tokens)
        assert stopped([*command, "cluster=local", "cluster.workers=2"], 1000) > 0
    kept = sorted((tmp_path / "out" / "_run" / "carries").rglob("*.carry"))
    assert kept
    with pytest.MonkeyPatch.context() as patch:
        last = Stop(patch, 1 << 40)
        assert main([*command, "cluster=inprocess"]) == 0
    assert carries(tmp_path / "out")["resumed_documents"] == len(kept)
    assert carries(tmp_path / "out")["recomputed_tokens"] == 0
    assert main([*job(model, source, tmp_path / "alone"), "cluster=inprocess"]) == 0
    for name in ("documents", "windows"):
        order = [("doc_id", "ascending"), *([("window_index", "ascending")] * (name == "windows"))]
        assert table(tmp_path / "out", name).sort_by(order).equals(table(tmp_path / "alone", name).sort_by(order))
    assert last.seen < sum(row["num_tokens"] for row in rows(tmp_path / "alone", "documents"))
