"""What a user names as input, and what is found there."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from longscan.pipeline.errors import InputError
from longscan.pipeline.read import hub
from longscan.pipeline.read.find import find_files
from longscan.pipeline.storage.location import atomic_write, locate

TREE = [
    "b.parquet",
    "a.PARQUET",
    "deep/er/c.pq",
    "deep/date=2024-01-01/d.parquet",
    "deep/_temporary/e.parquet",
    "_side.parquet",
    ".hidden.parquet",
    ".git/f.parquet",
    "notes.txt",
    "more.jsonl",
]
FOUND = ["a.PARQUET", "b.parquet", "deep/date=2024-01-01/d.parquet", "deep/er/c.pq"]


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The path or URI of a folder that holds TREE."""
    path = str(tmp_path / "in") if request.param == "local" else f"memory://{uuid.uuid4().hex}/in"
    for name in TREE:
        place = locate(path)
        for part in name.split("/"):
            place = place / part
        atomic_write(place, b"12345")
    return path


def names(path: str, **more: Any) -> list[str]:
    return [file.name for file in find_files(path, **more)]


def test_a_folder_is_searched_to_its_depths(root: str) -> None:
    assert names(root) == FOUND
    assert names(root + "/") == FOUND
    assert names(root + "/deep") == ["date=2024-01-01/d.parquet", "er/c.pq"]


def test_what_is_found_can_be_opened_by_its_path(root: str) -> None:
    for file in find_files(root) + find_files(f"{root}/deep/*") + find_files(f"{root}/b.parquet"):
        assert file.size == 5
        assert file.version.partition(":")[0] in ("mtime_ns", "created")
        assert file.path.startswith(root)
        with fsspec.open(file.path, "rb") as opened:
            assert opened.read() == b"12345"


def test_one_file_is_taken_whatever_its_name(root: str) -> None:
    assert names(f"{root}/b.parquet") == ["b.parquet"]
    assert names(f"{root}/_side.parquet") == ["_side.parquet"]
    assert names(f"{root}/more.jsonl") == ["more.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.parquet", ["b.parquet"]),
        ("*", ["a.PARQUET", "b.parquet", "deep/date=2024-01-01/d.parquet", "deep/er/c.pq", "more.jsonl", "notes.txt"]),
        ("deep/date=*", ["date=2024-01-01/d.parquet"]),
        ("deep/**/*.p*", ["date=2024-01-01/d.parquet", "er/c.pq"]),
        ("[ab].*", ["a.PARQUET", "b.parquet"]),
        ("?.parquet", ["b.parquet"]),
        ("_s*.parquet", ["_side.parquet"]),
    ],
)
def test_globs(root: str, pattern: str, found: list[str]) -> None:
    assert names(f"{root}/{pattern}") == found


def test_names_of_a_glob_begin_where_its_wildcards_do(root: str) -> None:
    assert names(f"{root}/*/er/*.pq") == ["deep/er/c.pq"]
    assert names(f"{root}/deep/*/*.pq") == ["er/c.pq"]


def test_a_name_that_is_there_is_no_glob(tmp_path: Path) -> None:
    folder = tmp_path / "set[1]*"
    folder.mkdir()
    (folder / "x?.parquet").write_bytes(b"")
    (tmp_path / "set1z").mkdir()
    assert names(str(folder)) == ["x?.parquet"]
    assert names(str(folder / "x?.parquet")) == ["x?.parquet"]


def test_what_is_not_there_says_how_far_the_path_goes(root: str) -> None:
    with pytest.raises(InputError, match=r"b.parquett: expected .* found no 'b.parquett' in .*/in; near it: b.parquet"):
        find_files(f"{root}/b.parquett")
    with pytest.raises(InputError, match=r"found no 'dip' in .*/in; (near it: deep|there: )"):
        find_files(f"{root}/dip/er/c.pq")
    with pytest.raises(InputError, match=r"zzzz: .* found no 'zzzz' in .*; there: .*a.PARQUET, b.parquet, deep"):
        find_files(f"{root}/zzzz")


def test_a_folder_without_parquet_says_what_it_holds(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.csv", "README", ".x.parquet"):
        (tmp_path / name).write_text("x")
    with pytest.raises(InputError, match=r"expected Parquet files .* found 2 \.jsonl, 1 \.csv, 1 without a suffix"):
        find_files(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="found no files at all"):
        find_files(str(tmp_path / "empty"))
    with pytest.raises(InputError, match=r"expected a glob that matches Parquet files, found in .*: .*a\.jsonl"):
        find_files(str(tmp_path / "*.parquet"))


def test_the_output_inside_the_input_is_no_input(tmp_path: Path) -> None:
    for name in ("a.parquet", "out/documents/part.parquet"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert names(str(tmp_path), exclude=locate(str(tmp_path / "out"))) == ["a.parquet"]


@pytest.mark.parametrize("inside", ["", "/documents", "/documents/*.parquet", "/documents/part.parquet"])
def test_an_input_that_lies_in_the_output_is_refused(root: str, inside: str) -> None:
    atomic_write(locate(root) / "out" / "documents" / "part.parquet", b"")
    with pytest.raises(InputError, match=r"output\.path: expected a folder outside of the input, found .*/out, in which the input lies"):
        find_files(f"{root}/out{inside}", exclude=locate(f"{root}/out"))
    assert "b.parquet" in names(root, exclude=locate(f"{root}/out")), "the other way round it is left out"
    assert names(f"{root}/b.parquet", exclude=locate(f"{root}/b")) == ["b.parquet"], "a name that begins alike is no folder above"


def test_a_link_into_the_output_is_still_in_it(tmp_path: Path) -> None:
    (tmp_path / "out" / "documents").mkdir(parents=True)
    (tmp_path / "in").symlink_to(tmp_path / "out" / "documents")
    with pytest.raises(InputError, match="in which the input lies"):
        find_files(str(tmp_path / "in"), exclude=locate(str(tmp_path / "out")))


def run_at(folder: str, *tables: str) -> None:
    """What find sees of a run of longscan."""
    for name in ("_run/fingerprint.json", *(f"{table}/part-00000-of-00001.parquet" for table in tables)):
        place = locate(folder)
        for part in name.split("/"):
            place = place / part
        atomic_write(place, b"12345")


def test_outputs_of_earlier_runs_are_no_input(root: str, caplog: pytest.LogCaptureFixture) -> None:
    run_at(f"{root}/out", "documents", "errors")
    run_at(f"{root}/deep/out", "windows")
    atomic_write(locate(root) / "mine" / "documents" / "part-00000-of-00001.parquet", b"")
    with caplog.at_level("INFO"):
        assert names(root) == [*FOUND, "mine/documents/part-00000-of-00001.parquet"]
    assert caplog.messages == [f"no input, since runs of longscan wrote them: 3 files in {root}/deep/out, {root}/out"]
    assert names(f"{root}/deep") == ["date=2024-01-01/d.parquet", "er/c.pq"]
    assert names(f"{root}/d*") == ["deep/date=2024-01-01/d.parquet", "deep/er/c.pq"]
    assert names(f"{root}/**/*.parquet") == [name for name in FOUND if name.endswith("t")] + ["mine/documents/part-00000-of-00001.parquet"]


def test_what_a_run_has_written_is_input_where_its_table_is_named(root: str) -> None:
    run_at(f"{root}/out", "documents", "errors")
    assert names(f"{root}/out/documents") == ["part-00000-of-00001.parquet"]
    assert names(f"{root}/*/documents") == ["out/documents/part-00000-of-00001.parquet"]
    with pytest.raises(InputError, match=r"found only what a run of longscan has written; to read its documents name .*/out/documents"):
        find_files(f"{root}/out")
    with pytest.raises(InputError, match="found only what runs of longscan have written"):
        find_files(f"{root}/out/*")


def test_links_are_followed_each_folder_once(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.parquet").write_bytes(b"1")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "near").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "round").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "gone.parquet").symlink_to(tmp_path / "nowhere")
    gone, linked = find_files(str(tmp_path / "in"))
    assert linked.name == "near/a.parquet"
    assert linked.error is None
    assert gone.name == "gone.parquet"
    assert gone.error is not None
    assert "No such file" in gone.error


def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.parquet")
    with open(path, "wb") as file:
        file.write(b"12")
    (found,) = find_files(str(tmp_path))
    assert found.name == "caf\\xe9.parquet"
    assert os.stat(found.path).st_size == 2


def test_a_store_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Unable to locate credentials for https://x?sig=s3cr3t")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.info", refuse)
    with pytest.raises(InputError, match=r"memory://a: cannot be listed: RuntimeError: Unable to locate credentials for https://x\?\*\*\*"):
        find_files("memory://a")


@pytest.fixture
def hub_in_memory(monkeypatch: pytest.MonkeyPatch) -> str:
    """A stand-in for the hub: what lies under hf:// lies in memory. The URI of an org there."""
    org = uuid.uuid4().hex
    monkeypatch.setattr(hub, "locate", lambda uri: locate(uri.replace("hf://", "memory://")))
    return f"hf://datasets/{org}"


def test_a_dataset_that_is_parquet_on_the_hub_is_read_there(hub_in_memory: str) -> None:
    lies = locate(hub_in_memory.replace("hf://", "memory://")) / "novels"
    for name in ("train-0.parquet", "train-1.parquet", "test-0.parquet"):
        atomic_write(lies / "data" / name, b"1")
    atomic_write(lies / "README.md", b"1")
    assert names(f"{hub_in_memory}/novels") == ["data/test-0.parquet", "data/train-0.parquet", "data/train-1.parquet"]
    assert names(f"{hub_in_memory}/novels/data/train-*.parquet") == ["train-0.parquet", "train-1.parquet"]


def test_any_other_dataset_goes_through_datasets_once(hub_in_memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    folder = tmp_path / "jsonl"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "test.jsonl").write_text('{"text": "three"}\n')
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    load = datasets.load_dataset
    asked: list[tuple[str, Any, Any]] = []

    def local(repo: str, *, name: str | None, revision: str | None) -> Any:
        asked.append((repo, name, revision))
        return load(str(folder), cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", local)
    found = find_files(f"{hub_in_memory}/lines@main/config")
    assert [file.name for file in found] == ["test.parquet", "train.parquet"]
    assert asked == [(f"{hub_in_memory.rpartition('/')[2]}/lines", "config", "main")]
    assert datasets.load_dataset is local
    import pyarrow.parquet as pq

    assert pq.read_table(found[1].path).column("text").to_pylist() == ["one", "two"]
    assert find_files(f"{hub_in_memory}/lines") == find_files(f"{hub_in_memory}/lines") == found, "made once, found again"
    assert len(list((tmp_path / "cache" / "longscan").iterdir())) == 1


def test_a_dataset_that_is_nowhere(hub_in_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InputError, match=r"found no .*nor can `datasets` load \w+/gone: ConnectionError: the hub cannot be reached"):
        find_files(f"{hub_in_memory}/gone")
    with pytest.raises(InputError, match="expected hf://datasets/<org>/<name>"):
        find_files("hf://models/x")
