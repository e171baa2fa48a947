"""Places a user may name, and files that become visible whole or not at all."""

from __future__ import annotations

import errno
import os
import pickle
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from longscan.pipeline.errors import ConfigError, InputError, OutputError
from longscan.pipeline.storage.location import (
    Location,
    atomic_write,
    children,
    commit_file,
    create_exclusive,
    exists,
    locate,
    read_bytes,
    remove,
    remove_all,
    remove_tree,
    writing,
)


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty folder, on each kind of file system."""
    return locate(str(tmp_path / "out") if request.param == "local" else f"memory://{uuid.uuid4().hex}/out")


def test_a_location_never_shows_its_secrets() -> None:
    place = locate("memory://me:s3cr3t@somewhere/x")
    assert "s3cr3t" not in str(place / "part")
    assert "s3cr3t" in (place / "part").uri, "what opens it keeps them"


@pytest.mark.parametrize(
    "name", ["a b", "x=1,y", "[0]", "{a}", "(c)", "~tilde", "#h", "ünïcödé 日本", "a::b", "per%20cent", "q?", "st*r", "new\nline"]
)
def test_a_local_path_may_hold_any_characters(tmp_path: Path, name: str) -> None:
    place = locate(str(tmp_path / name))
    assert place.is_local
    assert place.path == str(tmp_path / name)
    atomic_write(place / name, b"x")
    assert (tmp_path / name / name).read_bytes() == b"x"
    assert children(place) == [name]


def test_paths_are_absolute_and_home_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert locate("x/../y").path == str(tmp_path / "y")
    assert locate("~/y").path == str(tmp_path / "home" / "y")
    assert locate(f"file://{tmp_path}/y").path == str(tmp_path / "y")
    (tmp_path / "~").mkdir()
    assert locate("~").path == str(tmp_path / "~"), "a name that is there is taken as it is"


@pytest.mark.parametrize(
    ("uri", "below", "above"),
    [
        ("memory://a/b", "memory://a/b/c", "memory://a"),
        ("memory://a/b/", "memory://a/b/c", "memory://a"),
        ("memory://a", "memory://a/c", "memory://"),
        ("memory://", "memory://c", "memory://"),
        ("/a/b", "/a/b/c", "/a"),
        ("/a", "/a/c", "/"),
        ("/", "/c", "/"),
    ],
)
def test_locations_join_and_part(uri: str, below: str, above: str) -> None:
    place = locate(uri)
    assert (place / "c").uri == below
    assert (place / "c").path == locate(below).path
    assert place.parent.uri == above
    assert place.parent.path.rstrip("/") == locate(above).path.rstrip("/")


@pytest.mark.parametrize("error", [InputError, OutputError, ConfigError])
def test_a_scheme_that_nobody_knows(error: type[Exception]) -> None:
    with pytest.raises(error, match=r"nope://\*\*\*@x: expected a path or a URI that fsspec opens.*nope"):
        locate("nope://k:s@x", error)  # type: ignore[arg-type]
    with pytest.raises(error, match="empty"):
        locate("", error)  # type: ignore[arg-type]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(_: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("longscan.pipeline.storage.location.url_to_fs", without)
    with pytest.raises(InputError, match="s3://b/x: its file system needs a package that is not installed: Install s3fs"):
        locate("s3://b/x")


def test_write_read_list_remove(place: Location) -> None:
    assert not exists(place)
    assert children(place) == []
    assert read_bytes(place / "a") is None
    atomic_write(place / "a", b"one")
    atomic_write(place / "a", b"two")
    atomic_write(place / "deep" / "er" / "b", b"")
    assert children(place) == ["a", "deep"]
    assert read_bytes(place / "a") == b"two"
    assert read_bytes(place / "deep" / "er" / "b") == b""
    remove(place / "a")
    remove(place / "a")
    remove_all(place / "deep" / "er", ["b"])
    assert read_bytes(place / "deep" / "er" / "b") is None
    atomic_write(place / "c", b"")
    remove_tree(place)
    remove_tree(place)
    assert not exists(place / "c")


def test_a_location_travels_to_another_process(place: Location) -> None:
    atomic_write(place / "a", b"x")
    assert read_bytes(pickle.loads(pickle.dumps(place)) / "a") == b"x"


def test_create_exclusive_lets_one_through(place: Location) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: create_exclusive(place / "lock", b"%d" % i), range(32 if place.is_local else 1)))
    assert sum(won) == 1
    assert read_bytes(place / "lock") == b"%d" % won.index(True)
    assert not create_exclusive(place / "lock", b"late")
    assert children(place) == ["lock"], "no temporary file stays"


def test_create_exclusive_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    place = locate(str(tmp_path / "lock"))
    assert create_exclusive(place, b"mine")
    assert not create_exclusive(place, b"theirs")
    assert read_bytes(place) == b"mine"
    assert os.listdir(tmp_path) == ["lock"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = locate(str(tmp_path / "a"))
    atomic_write(place, b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"No space left on device.*Free some space.*what is committed is kept"):
        atomic_write(place, b"new")
    assert os.listdir(tmp_path) == ["a"]
    assert read_bytes(place) == b"old"


def test_a_name_is_synced_after_its_content_and_each_new_folder_in_the_one_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    whole = os.fsync

    def recorded(handle: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path))
        whole(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    finished = tmp_path / "finished"
    finished.write_bytes(b"x")
    commit_file(str(finished), locate(str(tmp_path / "out" / "documents" / "part")))
    assert synced == ["finished", ".", "out", "out/documents"]
    synced.clear()
    atomic_write(locate(str(tmp_path / "out" / "a")), b"x")
    assert [synced[0].startswith("out/.longscan-a-"), *synced[1:]] == [True, "out"]


def test_commit_file_moves_a_finished_file(place: Location, tmp_path: Path) -> None:
    finished = tmp_path / "finished"
    for content in (b"one", b"two"):
        finished.write_bytes(content)
        commit_file(str(finished), place / "documents" / "part")
        assert read_bytes(place / "documents" / "part") == content
        assert not finished.exists()


def test_a_real_full_disk(tmp_path: Path) -> None:
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(OutputError, match=r"No space left on device.*Free some space"),
        writing(locate(str(tmp_path))),
    ):
        full.write(b"x")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "raise the quota"),
        (errno.EROFS, "may write to"),
        (errno.EACCES, "may write to"),
        (errno.EIO, "can be written"),
    ],
)
def test_what_cannot_be_written_says_what_to_do(tmp_path: Path, number: int, advice: str) -> None:
    with (
        pytest.raises(OutputError, match=f"{tmp_path.name}: cannot be written: .*{os.strerror(number)}.*{advice}"),
        writing(locate(str(tmp_path))),
    ):
        raise OSError(number, os.strerror(number))


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    writes: list[Callable[[Location], object]] = [lambda place: atomic_write(place, b""), lambda place: create_exclusive(place, b"")]
    for write in writes:
        with pytest.raises(OutputError, match="a part of this path is a file"):
            write(locate(str(tmp_path / "file" / "x")))


def test_a_remote_failure_is_redacted() -> None:
    class Refusing:
        protocol = "s3"

        def pipe_file(self, path: str, *_: Any) -> None:
            raise RuntimeError(f"403 for https://host/{path}?sig=s3cr3t")

    with pytest.raises(OutputError, match=r"s3://\*\*\*@b/x: cannot be written: 403 for https://host/b/x\?\*\*\*") as caught:
        atomic_write(Location(Refusing(), "b/x", "s3://k:s3cr3t@b/x"), b"")
    assert "s3cr3t" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_not_made() -> None:
    class Store:
        protocol = ("s3", "s3a")

        def pipe_file(self, path: str, *_: Any, **__: Any) -> None:
            raise FileNotFoundError(f"The specified bucket does not exist: {path}")

        put_file = pipe_file

    place = Location(Store(), "buckett/x", "s3://buckett/x")
    for write in (lambda: atomic_write(place, b""), lambda: create_exclusive(place, b""), lambda: commit_file("x", place)):
        with pytest.raises(OutputError, match="s3://buckett/x: cannot be written: The specified bucket does not exist"):
            write()


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), writing(locate(str(tmp_path))):
        _ = 1 // 0
