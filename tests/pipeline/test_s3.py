"""Input and output in an object store: a real server on loopback, spoken to through s3fs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from fakes import tiny_checkpoint
from guarded import guarded
from longscan.pipeline.commit.lock import RunLock
from longscan.pipeline.errors import OutputError
from longscan.pipeline.storage.location import atomic_write, children, commit_file, create_exclusive, exists, locate, read_bytes, remove
from starts import DIE, Starts
from stopping import carries
from tiny_jobs import same_tables, table, texts, words, write_input
from waiting import HANG_S, until

s3fs = pytest.importorskip("s3fs", reason="a machine for the GPU's tests alone may not have it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the client's libraries

SECRET = "wJalrXUtnFEMI-not-to-be-seen"
BUCKET = "corpus"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3fs.S3FileSystem]:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(sys.executable).with_name("moto_server"))
    log = tmp_path_factory.mktemp("server") / "log"
    with guarded([script, "-H", "127.0.0.1", "-p", str(port)], log) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        _await(port, server)
        s3fs.S3FileSystem.clear_instance_cache()  # one that another test made has no keys
        fs = s3fs.S3FileSystem()
        fs.mkdir(BUCKET)
        yield fs


def _await(port: int, server: subprocess.Popen[bytes]) -> None:
    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=HANG_S).close()
        except OSError:
            return False
        return True

    until(answers, server)


def test_the_few_operations_that_the_pipeline_needs(store: s3fs.S3FileSystem, tmp_path: Path) -> None:
    place = locate(f"s3://{BUCKET}/operations", OutputError)
    assert children(place) == []
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: create_exclusive(place / "one", str(n).encode()), range(8)))
    assert won.count(True) == 1, "of several at once, one creates it"
    assert read_bytes(place / "one") == str(won.index(True)).encode()
    atomic_write(place / "one", b"replaced")
    assert read_bytes(place / "one") == b"replaced"
    (tmp_path / "finished").write_bytes(b"x" * (1 << 20))
    commit_file(str(tmp_path / "finished"), place / "two")
    assert store.info((place / "two").path)["size"] == 1 << 20
    assert children(place) == ["one", "two"]
    remove(place / "one")
    assert not exists(place / "one")
    with pytest.raises(OutputError, match="cannot be written"):
        atomic_write(locate("s3://no-such-bucket/x", OutputError), b"")


@pytest.mark.usefixtures("store")
def test_one_run_at_a_time() -> None:
    place = locate(f"s3://{BUCKET}/locked", OutputError)
    with RunLock(place), pytest.raises(OutputError, match="another run is at work"):
        RunLock(place)
    RunLock(place).release()


@pytest.fixture(scope="module")
def starts(store: s3fs.S3FileSystem, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    assert store.exists(BUCKET), "forked processes find the server by the environment"
    with Starts(tmp_path_factory.mktemp("starts")) as starts:
        yield starts


PATCH = (
    DIE
    + """
import leisure
from longscan.pipeline.keep import carryfiles
from longscan.pipeline.output import folder as output
from longscan.pipeline.write import writer as write
def at(place, name, when):
    whole = getattr(place, name)
    setattr(place, name, lambda *a: die() if when(*a) else whole(*a))
"""
)
CRASHES = {
    "in_the_planner": "at(output, 'atomic_write', lambda to, _: to.name == 'fingerprint.json')",
    "behind_a_carry_with_the_one_before_still_there": "leisure.take(); at(carryfiles, 'remove', lambda _: True)",
    "between_two_files_of_a_shard": "at(write, 'commit_file', lambda _, to: 'errors/part-00001' in to.path)",
    "before_the_manifest": "at(write, 'write_report', lambda _, report: report.index == 1)",
}


@pytest.fixture(scope="module")
def job(store: s3fs.S3FileSystem, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("job")
    model = tiny_checkpoint(folder / "model", tokenizer=True)
    source = write_input(folder / "in.parquet", [*texts(7), None], row_group=2)
    store.put_file(str(source), f"{BUCKET}/in/in.parquet")
    sizes = ("output.shard_tokens=300", "engine.checkpoint_tokens=64")
    more = ("task=embed_score", "task.score.window_tokens=64", "max_errors=1", "cluster=inprocess")
    command = words(model, f"s3://{BUCKET}/in", "", *sizes, *more)
    return [word for word in command if not word.startswith("output.path")]


def fetched(store: s3fs.S3FileSystem, name: str, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    store.get(f"{BUCKET}/{name}/", f"{to}/", recursive=True)
    return to


@pytest.fixture(scope="module")
def undisturbed(starts: Starts, job: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same input's output on a local disk."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    ended = starts.start([*job, f"output.path={out}"])
    assert ended.code == 0, ended.said
    return out


def test_states_are_kept_and_gone_on_from(store: s3fs.S3FileSystem, starts: Starts, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", tokenizer=True)
    names = [f"document {n}" for n in range(3)]
    text = [f"{n} " + " ".join(texts(3 + n, seed=n)) for n in range(3)]
    command = ["task=embed", "input.id_column=name", "output.keep_state=true", "cluster=inprocess"]
    first = write_input(tmp_path / "in0.parquet", [part[: 2 * len(part) // 3] for part in text], name=names)
    second = write_input(tmp_path / "in1.parquet", text, name=names)
    kept, grown = f"s3://{BUCKET}/kept", f"s3://{BUCKET}/grown"
    ended = starts.start(words(model, first, kept, *command))
    assert ended.code == 0, ended.said
    ended = starts.start(words(model, second, grown, *command, f"input.state_path={kept}"))
    assert ended.code == 0, ended.said
    whole = starts.start(words(model, second, tmp_path / "whole", *command))
    assert whole.code == 0, whole.said
    out = fetched(store, "grown", tmp_path / "out")
    documents = table(out, "documents")
    assert documents.drop_columns(["continued_at"]).equals(table(tmp_path / "whole", "documents"))
    assert all(at > 0 for at in documents["continued_at"].to_pylist())
    for path in out.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


LATE = """
from longscan.pipeline.storage import remote
remote.children = lambda fs, folder: []
"""


def test_a_store_whose_listings_are_late(
    store: s3fs.S3FileSystem, starts: Starts, job: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    """None has anything of what the run has written."""
    ended = starts.start([*job, f"output.path=s3://{BUCKET}/late"], LATE)
    assert ended.code == 0, ended.said
    assert store.exists(f"{BUCKET}/late/_SUCCESS")
    assert same_tables(fetched(store, "late", tmp_path / "out"), undisturbed) == ["documents", "errors", "windows"]


@pytest.mark.parametrize("crash", CRASHES.values(), ids=CRASHES.keys())
def test_a_run_that_is_killed_and_started_again(
    store: s3fs.S3FileSystem, starts: Starts, job: list[str], undisturbed: Path, tmp_path: Path, crash: str
) -> None:
    name = tmp_path.name
    command = [*job, f"output.path=s3://{BUCKET}/{name}"]
    died = starts.start(command, PATCH + crash)
    assert died.code == -9, died.said
    assert not store.exists(f"{BUCKET}/{name}/_SUCCESS")
    ended = starts.start(command)
    assert ended.code == 0, ended.said
    out = fetched(store, name, tmp_path / "out")
    assert same_tables(out, undisturbed) == ["documents", "errors", "windows"]
    assert "carry" not in crash or carries(out)["resumed_documents"] > 0, "it went on inside a document"
    for path in out.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()
    assert SECRET not in died.said + ended.said
    again = starts.start(command)
    assert (again.code, "complete already" in again.said) == (0, True)
