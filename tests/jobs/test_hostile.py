"""Inputs and outputs as the world has them, through the command: each row once, each refusal with what, where and what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import tiny_checkpoint, tiny_tokenizer
from longscan.jobs.run import main
from longscan.pipeline.commit.lock import RunLock
from longscan.pipeline.storage.location import locate
from tiny_jobs import rows, success, table, texts, words, write_input

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_input(tmp_path_factory.mktemp("in") / "in.parquet", texts(5))


def refused(capsys: Capture, arguments: list[str], *says: object) -> str:
    """The command exits with 2 and one message that says all of `says`. Returns what it printed."""
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("longscan: error: ") == 1
    assert "Traceback" not in said
    for part in says:
        assert str(part) in said, said
    return said


class TestOutput:
    def test_two_runs_on_one_output(self, model: Path, good: Path, tmp_path: Path, capsys: Capture) -> None:
        with RunLock(locate(str(tmp_path / "out"))):
            refused(capsys, words(model, good, tmp_path / "out"), "another run is at work", tmp_path / "out", os.getpid(), "Wait for it")
        assert main(words(model, good, tmp_path / "out")) == 0

    def test_a_folder_that_is_not_a_run(self, model: Path, good: Path, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years of work")
        for overwrite in ("false", "true"):
            job = words(model, good, tmp_path / "out", f"output.overwrite={overwrite}")
            refused(capsys, job, tmp_path / "out", "thesis.tex", "Set output.path")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
        assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"

    @pytest.mark.parametrize("below", ["", "/deeper/still"])
    def test_a_file_where_the_folder_belongs(self, model: Path, good: Path, tmp_path: Path, capsys: Capture, below: str) -> None:
        (tmp_path / "file").write_text("x")
        refused(capsys, words(model, good, f"{tmp_path / 'file'}{below}"), tmp_path / "file", "expected a folder")
        assert (tmp_path / "file").read_text() == "x"

    @pytest.mark.skipif(not Path("/proc/self").exists(), reason="a place where nobody can write is known on Linux only")
    def test_a_place_where_nobody_can_write(self, model: Path, good: Path, capsys: Capture) -> None:
        refused(capsys, words(model, good, "/proc/longscan-out"), "/proc/longscan-out", "cannot be written", "Set output.path")

    def test_the_output_inside_the_input_is_not_read(self, model: Path, tmp_path: Path) -> None:
        write_input(tmp_path / "in" / "in.parquet", texts(3))
        for _ in range(2):
            assert main(words(model, tmp_path / "in", tmp_path / "in" / "out")) == 0
        assert success(tmp_path / "in" / "out")["documents"] == 3


class TestColumns:
    def test_a_text_column_that_does_not_exist(self, model: Path, tmp_path: Path, capsys: Capture) -> None:
        source = write_input(tmp_path / "in.parquet", texts(3), body=pa.array(["x"] * 3), year=pa.array([1] * 3))
        refused(capsys, words(model, source, tmp_path / "out", "input.text_column=txt"), "input.text_column=txt", "text, body, year")

    def test_a_column_that_holds_no_text(self, model: Path, tmp_path: Path, capsys: Capture) -> None:
        source = write_input(tmp_path / "in.parquet", texts(3), year=pa.array([1] * 3))
        refused(
            capsys, words(model, source, tmp_path / "out", "input.text_column=year"), "input.text_column=year", "expected strings", "int64"
        )

    def test_one_file_of_several_without_it(self, model: Path, tmp_path: Path) -> None:
        write_input(tmp_path / "in" / "a.parquet", texts(3))
        pq.write_table(pa.table({"body": ["x", "y"]}), tmp_path / "in" / "b.parquet")
        assert main(words(model, tmp_path / "in", tmp_path / "out", "max_errors=2")) == 0
        assert len(rows(tmp_path / "out", "documents")) == 3
        errors = rows(tmp_path / "out", "errors")
        assert [(row["file"], row["row"], row["error"]) for row in errors] == [
            ("b.parquet", 0, "WrongColumns"),
            ("b.parquet", 1, "WrongColumns"),
        ]
        assert "the columns are body" in errors[0]["message"]

    def test_passthrough_of_any_type(self, model: Path, tmp_path: Path) -> None:
        columns: dict[str, Any] = {
            "meta": pa.array([{"a": 1, "b": ["x", None]}, None, {"a": None, "b": []}]),
            "tags": pa.array([["x"], [], None], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
            "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
            "when": pa.array([1, None, 3], pa.timestamp("us", "UTC")),
            "pairs": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int32())),
            "price": pa.array([None, None, None], pa.decimal128(10, 2)),
            "blob": pa.array([b"\xff", None, b""]),
            "nothing": pa.nulls(3),
        }
        source = write_input(tmp_path / "in.parquet", texts(3), **columns)
        assert main(words(model, source, tmp_path / "out", f"input.passthrough=[{','.join(columns)}]")) == 0
        found, wanted = table(tmp_path / "out", "documents"), pq.read_table(source)
        for name in columns:
            assert found[name].to_pylist() == wanted[name].to_pylist(), name

    def test_token_ids_instead_of_text(self, tmp_path: Path) -> None:
        """No tokenizer is needed; ids that the model does not have are an error row of their own."""
        bare = tiny_checkpoint(tmp_path / "bare")
        ids = pa.array([[1, 2, 3] * 50, [], None, [1, 320], [-1], list(range(320))], pa.list_(pa.int64()))
        pq.write_table(pa.table({"ids": ids}), tmp_path / "in.parquet")
        job = words(bare, tmp_path / "in.parquet", tmp_path / "out", "task=embed_score", "input.tokens_column=ids", "max_errors=3")
        assert main([*job, "task.score.window_tokens=64"]) == 0
        documents, errors = rows(tmp_path / "out", "documents"), rows(tmp_path / "out", "errors")
        assert [(row["doc_id"], row["num_tokens"]) for row in documents] == [
            ("in.parquet#0", 150),
            ("in.parquet#1", 0),
            ("in.parquet#5", 320),
        ]
        assert {row["num_bytes"] for row in documents} == {row["bits_per_byte"] for row in documents} == {None}
        assert [row["embedding"] is None for row in documents] == [False, True, False]
        assert [(row["row"], row["stage"]) for row in errors] == [(2, "read"), (3, "tokenize"), (4, "read")]
        assert {row["char_start"] for row in rows(tmp_path / "out", "windows")} == {None}


class TestRows:
    def test_null_empty_and_one_character_texts(self, model: Path, tmp_path: Path) -> None:
        source = write_input(tmp_path / "in.parquet", ["", None, "a", "日", "\x00", " ", *texts(2)])
        assert main(words(model, source, tmp_path / "out", "task=embed_score", "max_errors=1")) == 0
        documents = {row["doc_id"].partition("#")[2]: row for row in rows(tmp_path / "out", "documents")}
        assert list(documents) == ["0", "2", "3", "4", "5", "6", "7"]
        empty = documents["0"]
        assert (empty["num_tokens"], empty["embedding"], empty["log_likelihood"], empty["bits_per_byte"]) == (0, None, 0.0, None)
        assert documents["2"]["num_tokens"] == documents["2"]["num_scored_tokens"] == 1
        assert documents["3"]["num_bytes"] == 3
        (error,) = rows(tmp_path / "out", "errors")
        assert (error["doc_id"], error["row"], error["stage"], error["error"]) == ("in.parquet#1", 1, "read", "NullText")

    def test_invalid_utf8(self, model: Path, tmp_path: Path) -> None:
        data = [b"fine", b"not \xff fine", "schön".encode(), b"cut \xc3"]
        pq.write_table(pa.table({"text": pa.array(data, pa.binary()).view(pa.string())}), tmp_path / "in.parquet")
        assert main(words(model, tmp_path / "in.parquet", tmp_path / "out", "max_errors=2")) == 0
        assert [row["doc_id"] for row in rows(tmp_path / "out", "documents")] == ["in.parquet#0", "in.parquet#2"]
        errors = rows(tmp_path / "out", "errors")
        assert [(row["row"], row["error"]) for row in errors] == [(1, "InvalidUtf8"), (3, "InvalidUtf8")]
        assert "0xff at 4" in errors[0]["message"]

    @pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()], ids=str)
    def test_kinds_of_text(self, model: Path, good: Path, tmp_path: Path, kind: pa.DataType) -> None:
        pq.write_table(pa.table({"text": pa.array(texts(5), pa.string()).cast(kind)}), tmp_path / "in.parquet")
        for name, source in (("plain", good), ("other", tmp_path / "in.parquet")):
            assert main(words(model, source, tmp_path / name)) == 0
        assert table(tmp_path / "other", "documents").equals(table(tmp_path / "plain", "documents"))

    def test_a_corrupt_file_and_a_corrupt_page_among_good_ones(self, model: Path, tmp_path: Path, capsys: Capture) -> None:
        folder = tmp_path / "in"
        write_input(folder / "a.parquet", texts(4, seed=1))
        write_input(folder / "b.parquet", texts(4, seed=2))
        data = bytearray((folder / "b.parquet").read_bytes())
        data[-6:] = b"\xff\xff\xff\x7fPAR"
        (folder / "b.parquet").write_bytes(data)
        pq.write_table(
            pa.table({"text": texts(6, seed=3)}), folder / "c.parquet", row_group_size=2, use_dictionary=False, write_page_checksum=True
        )
        chunk = pq.read_metadata(folder / "c.parquet").row_group(1).column(0)
        data = bytearray((folder / "c.parquet").read_bytes())
        middle = chunk.data_page_offset + chunk.total_compressed_size - 10
        data[middle : middle + 5] = b"\x00\xff\x00\xff\x00"
        (folder / "c.parquet").write_bytes(data)
        (folder / "d.parquet").write_bytes(b"")
        write_input(folder / "e.parquet", texts(2, seed=4))
        assert main(words(model, folder, tmp_path / "out")) == 3
        said = capsys.readouterr().err
        assert "b.parquet" in said
        documents, errors = rows(tmp_path / "out", "documents"), rows(tmp_path / "out", "errors")
        assert [row["doc_id"] for row in documents] == [
            *(f"a.parquet#{n}" for n in range(4)),
            *(f"c.parquet#{n}" for n in (0, 1, 4, 5)),
            *(f"e.parquet#{n}" for n in range(2)),
        ]
        assert [(row["file"], row["row"]) for row in errors] == [
            *(("b.parquet", None), ("c.parquet", 2), ("c.parquet", 3), ("d.parquet", None)),
        ]
        assert success(tmp_path / "out")["errors"] == 4

    def test_ids_are_data_and_never_paths(self, model: Path, tmp_path: Path, capsys: Capture) -> None:
        ids = [
            "../../../evil",
            f"{tmp_path}/evil",
            "a\x00b",
            "dup",
            "dup",
            "🙂",
            "\x1b[31mred",
            "\r\nline",
            "",
            "y" * 65536,
            "z" * 65537,
            None,
        ]
        source = write_input(tmp_path / "in" / "\x1b[2Jbad\n00:00:00 done.parquet", texts(len(ids)), id=pa.array(ids))
        (tmp_path / "in" / "\x07broken.parquet").write_bytes(b"no")
        more = ("task=embed_score", "task.embedding.window_tokens=64", "task.score.window_tokens=64", "engine.checkpoint_tokens=64")
        assert main(words(model, source.parent, tmp_path / "out", *more, "input.id_column=id", "max_errors=3")) == 0
        assert [row["doc_id"] for row in rows(tmp_path / "out", "documents")] == ids[:-2]
        errors = rows(tmp_path / "out", "errors")
        assert [(row["doc_id"], row["error"]) for row in errors] == [(None, "UnreadableFile"), (None, "IdTooLong"), (None, "NullId")]
        assert "at most 65536 characters, found 65537" in errors[1]["message"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
        parts = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and "_run" not in path.parts]
        assert {path.name for path in parts} == {"part-00000-of-00001.parquet", "_SUCCESS"}
        said = capsys.readouterr().err
        assert "ids that an earlier document has too: 1 document, the first 'dup'" in said
        wrong = words(model, source.parent, tmp_path / "out", "input.text_column=\x1b[1mno")
        said += refused(capsys, wrong, "\\x1b[1mno", "\\x1b[2Jbad\n  00:00:00 done")
        assert not {"\x1b", "\x07"} & set(said)

    def test_files_of_several_schemas(self, model: Path, tmp_path: Path) -> None:
        """What fits is taken, whatever type it comes in; each row that does not is an error row that says why."""
        two: list[str | None] = list(texts(2))
        plain = pa.array(two)
        tables = {
            "a": {"text": plain, "p": pa.array([1, 2])},
            "b": {"text": plain.cast(pa.large_string()), "p": pa.array([3, 4], pa.int8())},
            "c": {"text": plain.dictionary_encode(), "p": pa.array(["5", "x"])},
            "d": {"text": pa.array([1, 2]), "p": pa.array([1, 2])},
            "e": {"body": plain, "p": pa.array([1, 2])},
            "f": {"text": plain},
            "g": {"text": plain, "p": pa.array([[1], None])},
        }
        (tmp_path / "in").mkdir()
        for name, columns in tables.items():
            pq.write_table(pa.table(columns), tmp_path / "in" / f"{name}.parquet")
        assert main(words(model, tmp_path / "in", tmp_path / "out", "input.passthrough=[p]", "max_errors=99")) == 0
        found = [(row["doc_id"], row["p"]) for row in rows(tmp_path / "out", "documents")]
        assert found == [("a.parquet#0", 1), ("a.parquet#1", 2), ("b.parquet#0", 3), ("b.parquet#1", 4), ("c.parquet#0", 5)]
        errors = [(row["doc_id"], row["error"]) for row in rows(tmp_path / "out", "errors")]
        wrong = [(f"{name}.parquet#{row}", "WrongColumns") for name in "def" for row in (0, 1)]
        assert errors == [("c.parquet#1", "InvalidPassthrough"), *wrong, *((f"g.parquet#{row}", "InvalidPassthrough") for row in (0, 1))]

    def test_no_rows_at_all(self, model: Path, tmp_path: Path) -> None:
        source = write_input(tmp_path / "in.parquet", [])
        assert main(words(model, source, tmp_path / "out", "task=embed_score")) == 0
        assert table(tmp_path / "out", "documents").num_rows == table(tmp_path / "out", "errors").num_rows == 0
        assert "embedding" in table(tmp_path / "out", "documents").column_names


class TestModel:
    def test_a_tokenizer_that_does_not_fit_the_model(self, model: Path, good: Path, tmp_path: Path, capsys: Capture) -> None:
        other = tiny_tokenizer(tmp_path / "other", vocab_size=400, lines=texts(50))
        refused(capsys, words(model, good, tmp_path / "out", f"model.tokenizer={other}"), "model.tokenizer", "below 320", "trained with")
        assert not (tmp_path / "out").exists()

    def test_no_tokenizer(self, good: Path, tmp_path: Path, capsys: Capture) -> None:
        bare = tiny_checkpoint(tmp_path / "bare")
        refused(capsys, words(bare, good, tmp_path / "out"), bare, "tokenizer", "model.tokenizer")

    def test_another_architecture(self, good: Path, tmp_path: Path, capsys: Capture) -> None:
        other = tiny_checkpoint(tmp_path / "model", tokenizer=True, model_type="bamba", architectures=["BambaForCausalLM"])
        refused(capsys, words(other, good, tmp_path / "out"), "bamba")

    def test_scores_from_a_model_without_a_head(self, good: Path, tmp_path: Path, capsys: Capture) -> None:
        base = tiny_checkpoint(tmp_path / "model", tokenizer=True, base_model=True, tied=False)
        refused(capsys, words(base, good, tmp_path / "out", "task=score"), "task=score", "output projection", "use task=embed")
        assert main(words(base, good, tmp_path / "out")) == 0


class TestPaths:
    @pytest.mark.parametrize("how", ["folder", "glob", "deep glob", "file URI", "memory URI", "odd name"])
    def test_places_of_input(self, model: Path, tmp_path: Path, how: str) -> None:
        import fsspec

        root = tmp_path / ("date=2024-01-01, [é] {x}" if how == "odd name" else "in")
        for n, name in enumerate(("a.parquet", "b/c.parquet", "b/d/e.parquet")):
            write_input(root / name, texts(2, seed=n))
        (root / "b" / "notes.txt").write_text("not Parquet")
        place = {
            "folder": str(root),
            "odd name": str(root),
            "glob": f"{root}/b/*.parquet",
            "deep glob": f"{root}/**/*.parquet",
            "file URI": f"file://{root}",
            "memory URI": f"memory://{tmp_path.name}/in",
        }[how]
        if how == "memory URI":
            fsspec.filesystem("memory").put(str(root), f"/{tmp_path.name}/in", recursive=True)
        expected = {"glob": ["c.parquet"]}.get(how, ["a.parquet", "b/c.parquet", "b/d/e.parquet"])
        assert main(words(model, place, tmp_path / "out")) == 0
        assert [row["doc_id"] for row in rows(tmp_path / "out", "documents")] == [f"{name}#{n}" for name in expected for n in range(2)]

    def test_an_output_elsewhere(self, model: Path, good: Path, tmp_path: Path) -> None:
        import fsspec

        memory = fsspec.filesystem("memory")
        for _ in range(2):
            assert main(words(model, good, f"memory://{tmp_path.name}/out")) == 0
        with memory.open(f"/{tmp_path.name}/out/documents/part-00000-of-00001.parquet") as file:
            assert pq.read_table(file).num_rows == 5
        assert json.loads(memory.cat_file(f"/{tmp_path.name}/out/_SUCCESS"))["documents"] == 5

    @pytest.mark.parametrize("name", ["gone.parquet", "gone/*.parquet"])
    def test_input_that_is_not_there(self, model: Path, good: Path, tmp_path: Path, capsys: Capture, name: str) -> None:
        refused(capsys, words(model, good.parent / name, tmp_path / "out"), "gone", good.parent)

    def test_a_folder_without_parquet(self, model: Path, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "data.jsonl").write_text("{}")
        refused(capsys, words(model, tmp_path / "in", tmp_path / "out"), "expected Parquet files", "1 .jsonl")


class TestSecrets:
    @pytest.mark.parametrize(
        "wrong",
        [
            "input.path=s3://KEY:{}@bucket/x.parquet",
            "input.path=https://localhost:1/x.parquet?sig={}",
            "input.path=simplecache::https://me:{}@localhost:1/x.parquet",
            "output.path=https://me:{}@localhost:1/out?sig={}",
            "model.path=https://me:{}@host/model?token={}",
            "model.tokenizer=https://me:{}@host/model?token={}",
            "task.classify.head=https://me:{}@host/head?sig={}",
            "cluster.address=ray://me:{}@127.0.0.1:1",
            "engine.lanes=s3://me:{}@x",
        ],
    )
    def test_a_secret_in_a_uri_is_never_said(self, model: Path, good: Path, tmp_path: Path, capsys: Capture, wrong: str) -> None:
        """Nor where a library quotes a part of the URI alone, as that of S3 does with a bucket's name."""
        more = {"cluster": ["cluster=ray"], "task": ["task=classify"]}.get(wrong.partition(".")[0], [])
        assert "s3cr3tive" not in refused(capsys, words(model, good, tmp_path / "out", *more, wrong.format(*["s3cr3tive"] * 2)))

    def test_nothing_of_it_is_written(self, model: Path, tmp_path: Path) -> None:
        import fsspec

        memory = fsspec.filesystem("memory")
        data = write_input(tmp_path / "in.parquet", texts(3)).read_bytes()
        place = "memory://me:s3cr3tive@host/in"
        memory.pipe_file(memory._strip_protocol(place) + "/good.parquet", data)
        memory.pipe_file(memory._strip_protocol(place) + "/bad.parquet", b"no")
        assert main(words(model, place, tmp_path / "out", "max_errors=1")) == 0
        assert len(rows(tmp_path / "out", "documents")) == 3
        for path in (tmp_path / "out").rglob("*"):
            assert path.is_dir() or b"s3cr3tive" not in path.read_bytes(), path


class TestVectors:
    def test_several_poolings_in_float16(self, model: Path, good: Path, tmp_path: Path) -> None:
        poolings = ("mean", "last", "max", "weighted_mean")
        small = ("task.embedding.dtype=float16", "task.embedding.truncate_dim=16", "task.embedding.window_tokens=64")
        assert main(words(model, good, tmp_path / "out", f"task.embedding.pooling=[{','.join(poolings)}]", *small)) == 0
        documents, windows = table(tmp_path / "out", "documents"), table(tmp_path / "out", "windows")
        for found in (documents, windows):
            for pooling in poolings:
                assert found.schema.field(f"embedding_{pooling}").type == pa.list_(pa.float16(), 16)
        vectors = np.array(documents["embedding_mean"].to_pylist())
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
        assert not np.allclose(vectors, np.array(documents["embedding_last"].to_pylist()), atol=1e-2)

    def test_a_document_has_the_same_bits_alone_and_in_company(self, model: Path, tmp_path: Path) -> None:
        source = write_input(tmp_path / "in.parquet", texts(21))
        (one,) = [write_input(tmp_path / "one.parquet", texts(21)[7:8])]
        for name, path in (("many", source), ("one", one)):
            assert main(words(model, path, tmp_path / name, "task=embed_score")) == 0
        company, alone = rows(tmp_path / "many", "documents")[7], rows(tmp_path / "one", "documents")[0]
        assert {key: alone[key] for key in alone if key != "doc_id"} == {key: company[key] for key in company if key != "doc_id"}
