"""Each row in one shard, once, in order; a plan that reads back as it was; a fingerprint that says what changed."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from longscan.kernels.segments import TILE
from longscan.pipeline.config import InputConfig, JobConfig
from longscan.pipeline.errors import InputError, OutputError
from longscan.pipeline.plan import planner as planning
from longscan.pipeline.plan.fingerprint import explain_difference, fingerprint, provenance, run_facts
from longscan.pipeline.plan.planner import CUT_BEYOND, Plan, make_plan
from longscan.pipeline.read.find import find_files
from longscan.pipeline.read.scan import scan
from longscan.pipeline.records import BYTES_PER_TOKEN
from longscan.pipeline.shards import Piece, RowGroup, Shard, SourceFile


def source(name: str, *groups: tuple[int, int], error: str | None = None) -> SourceFile:
    """A scanned file with row groups of (rows, bytes)."""
    return SourceFile(f"s3://key:s3cr3t@bucket/{name}", name, 100, "etag:1", tuple(RowGroup(*group) for group in groups), error)


def spans(plan: Plan) -> list[tuple[str, int, int]]:
    """(file, first row, last row + 1) of every piece, in the order of the shards."""
    return [
        (piece.file.name, piece.first_row, piece.first_row + piece.stop - piece.start)
        for shard in plan.shards
        for piece in shard.pieces
        if piece.row_group >= 0
    ]


def rows_of(plan: Plan) -> list[tuple[str, int]]:
    return [(name, row) for name, start, stop in spans(plan) for row in range(start, stop)]


groups = st.tuples(st.integers(0, 40), st.integers(0, 400_000))
inputs = st.lists(st.one_of(st.lists(groups, max_size=6), st.none()), max_size=8).map(
    lambda files: [
        source(f"{i}.parquet", error="no footer") if found is None else source(f"{i}.parquet", *found) for i, found in enumerate(files)
    ]
)


@given(files=inputs, shard_tokens=st.integers(1, 200_000), limit=st.one_of(st.none(), st.integers(0, 300)))
def test_each_row_is_in_one_shard_once_in_order(files: list[SourceFile], shard_tokens: int, limit: int | None) -> None:
    plan = make_plan(files, shard_tokens=shard_tokens, limit=limit)
    every = [(file.name, row) for file in files for row in range(file.num_rows)]
    assert rows_of(plan) == every[:limit]
    assert [shard.index for shard in plan.shards] == list(range(len(plan.shards)))
    assert {shard.total for shard in plan.shards} == {len(plan.shards)}
    assert len({shard.part_name for shard in plan.shards}) == len(plan.shards)


@given(files=inputs, shard_tokens=st.integers(1, 200_000))
def test_what_a_shard_is(files: list[SourceFile], shard_tokens: int) -> None:
    plan = make_plan(files, shard_tokens=shard_tokens)
    sizes = {(file.name, g): group for file in files for g, group in enumerate(file.row_groups)}

    def cost(piece: Piece) -> int:
        group = sizes[piece.file.name, piece.row_group]
        return max(group.num_bytes // BYTES_PER_TOKEN, group.num_rows * TILE)

    for shard in plan.shards:
        whole = [piece for piece in shard.pieces if piece.row_group >= 0]
        parts = [piece for piece in whole if piece.stop - piece.start < sizes[piece.file.name, piece.row_group].num_rows]
        if parts:
            assert shard.pieces == (parts[0],), "a slice of a row group is a shard of its own"
            assert cost(parts[0]) > CUT_BEYOND * plan.shard_tokens
        elif len(whole) > 1:
            assert sum(map(cost, whole)) <= plan.shard_tokens
        assert shard.reads_on == any(piece.start > 0 for piece in shard.pieces)
        assert shard.num_rows == sum(piece.stop - piece.start for piece in shard.pieces)


@given(files=inputs, shard_tokens=st.integers(1, 200_000))
def test_every_file_that_cannot_be_read_is_one_row(files: list[SourceFile], shard_tokens: int) -> None:
    plan = make_plan(files, shard_tokens=shard_tokens)
    broken = [piece for shard in plan.shards for piece in shard.pieces if piece.row_group < 0]
    assert [piece.file.name for piece in broken] == [file.name for file in files if file.error]
    assert all((piece.start, piece.stop, piece.file.error) == (0, 1, "no footer") for piece in broken)
    assert plan.num_rows == sum(file.num_rows for file in files) + len(broken)


@given(files=inputs, shard_tokens=st.integers(1, 200_000), limit=st.one_of(st.none(), st.integers(0, 300)))
def test_a_plan_reads_back_as_it_was(files: list[SourceFile], shard_tokens: int, limit: int | None) -> None:
    schema = pa.schema([("when", pa.timestamp("us", "UTC")), ("tags", pa.list_(pa.string()))])
    plan = make_plan(files, shard_tokens=shard_tokens, limit=limit, passthrough=schema, sizes={"lanes": 8, "step_tokens": 65536})
    text = plan.to_json()
    assert Plan.from_json(text, files) == plan
    on = replace(plan, device="a CPU")
    assert Plan.from_json(on.to_json(), files) == on
    assert "s3cr3t" not in text


@given(files=inputs, shard_tokens=st.integers(1, 200_000))
def test_chains_hold_every_shard_once_in_order(files: list[SourceFile], shard_tokens: int) -> None:
    plan = make_plan(files, shard_tokens=shard_tokens)
    chains = plan.chains()
    assert tuple(shard for chain in chains for shard in chain) == plan.shards
    for chain in chains:
        places = {(piece.file.name, piece.row_group) for shard in chain for piece in shard.pieces}
        assert len(chain) == 1 or len(places) == 1
        assert [shard.reads_on for shard in chain] == [False] + [True] * (len(chain) - 1)


@given(count=st.integers(1, 400), size=st.integers(0, 5000), most=st.integers(1, 50))
def test_no_more_shards_than_a_run_may_have(count: int, size: int, most: int) -> None:
    files = [source(f"{i:03d}.parquet", (3, size)) for i in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MAX_SHARDS", most)
        plan = make_plan(files, shard_tokens=1)
    assert 1 <= len(plan.shards) <= most
    assert len(rows_of(plan)) == 3 * count


def test_ten_thousand_shards_at_most() -> None:
    plan = make_plan([source("x.parquet", *[(1, 4000)] * 30_000)], shard_tokens=1000)
    assert 5000 <= len(plan.shards) <= 10_000
    assert plan.shard_tokens > 1000


PLANNED = """
import re
from pathlib import Path
import longscan.pipeline.run
from longscan.pipeline.plan.planner import Plan, make_plan
from longscan.pipeline.plan.tail import longest_first
from longscan.pipeline.shards import RowGroup, SourceFile
files = []
for n in range(20_000):
    groups = tuple(RowGroup(100, 20_000_000 + group) for group in range(50))
    files.append(SourceFile(f"/data/corpus/part-{n:05d}.parquet", f"part-{n:05d}.parquet", 1 << 30, f"etag:{n}", groups))
text = make_plan(files, shard_tokens=1 << 26).to_json()
chains = longest_first(Plan.from_json(text, files).chains())
# Not getrusage: its peak begins with that of the process that forked this one.
print(len(chains), int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


@pytest.mark.slow
def test_a_plan_of_a_million_row_groups_takes_less_than_a_gigabyte() -> None:
    """Five tera tokens in 20,000 files: planned, written and read back, beside all that a run's driver imports."""
    done = subprocess.run([sys.executable, "-c", PLANNED], capture_output=True, text=True, check=True)
    shards, peak = map(int, done.stdout.split())
    assert 5000 <= shards <= 10_000
    assert peak < 1_000_000_000


def test_row_groups_are_gathered_and_giant_ones_cut() -> None:
    files = [source("a.parquet", (10, 4000), (10, 4000)), source("b.parquet", (10, 16_000), (4, 40_000)), source("c.parquet", (1, 4))]
    plan = make_plan(files, shard_tokens=2000)
    pieces = [[(piece.file.name, piece.row_group, piece.start, piece.stop) for piece in shard.pieces] for shard in plan.shards]
    assert pieces == [
        [("a.parquet", 0, 0, 10), ("a.parquet", 1, 0, 10)],
        [("b.parquet", 0, 0, 10)],
        [("b.parquet", 1, 0, 1)],
        [("b.parquet", 1, 1, 2)],
        [("b.parquet", 1, 2, 3)],
        [("b.parquet", 1, 3, 4)],
        [("c.parquet", 0, 0, 1)],
    ]
    assert [shard.estimated_tokens for shard in plan.shards] == [2000, 4000, 2500, 2500, 2500, 2500, 1]
    assert plan.estimated_tokens == 16_001
    assert [len(chain) for chain in plan.chains()] == [1, 1, 4, 1]
    assert plan.shards[5].pieces[0].first_row == 13


def test_short_documents_count_as_a_tile_each() -> None:
    """Else a shard of empty texts would have no end."""
    plan = make_plan([source("x.parquet", *[(1000, 1000)] * 10)], shard_tokens=2000 * TILE)
    assert [shard.num_rows for shard in plan.shards] == [2000] * 5


def test_an_input_without_rows_is_one_shard_without_rows() -> None:
    nothing = (Shard(0, 1, (), 0),)
    assert make_plan([], shard_tokens=1).shards == nothing
    assert make_plan([source("x.parquet", (0, 0))], shard_tokens=1).shards == nothing
    assert make_plan([source("x.parquet", (5, 50))], shard_tokens=1, limit=0).shards == nothing
    assert nothing[0].part_name == "part-00000-of-00001.parquet"


def test_a_limit_ends_inside_a_row_group() -> None:
    files = [source("x.parquet", (10, 4000)), source("y.parquet", (10, 4000)), source("z.parquet", error="bad")]
    plan = make_plan(files, shard_tokens=9999, limit=13)
    assert spans(plan) == [("x.parquet", 0, 10), ("y.parquet", 0, 3)]
    assert plan.estimated_tokens == 1300
    assert all(piece.row_group >= 0 for shard in plan.shards for piece in shard.pieces), "what lies behind the limit is not looked at"


def test_a_shard_travels_without_the_footers_of_its_files() -> None:
    plan = make_plan([source("x.parquet", *[(10, 4000)] * 1000)], shard_tokens=1000)
    assert all(piece.file.row_groups == () for shard in plan.shards for piece in shard.pieces)


def test_shard_tokens_is_a_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="shard_tokens: expected at least 1, got 0"):
        make_plan([], shard_tokens=0)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', '{"format": 99}'])
def test_a_plan_that_cannot_be_read_back(text: str) -> None:
    with pytest.raises(OutputError, match="the run's plan"):
        Plan.from_json(text, [])


def test_a_plan_whose_file_is_gone() -> None:
    text = make_plan([source("x.parquet", (1, 1))], shard_tokens=1).to_json()
    with pytest.raises(OutputError, match=r"cannot be read back: .*x\.parquet"):
        Plan.from_json(text, [source("y.parquet")])


# What the footers say.


def write(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2, use_dictionary=False, compression="none")


def test_scan_counts_the_bytes_of_the_texts_alone(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", text=["a" * 10_000, "b" * 30_000, "c" * 5000], other=["z" * 9999] * 3)
    (file,) = scan(find_files(str(tmp_path)), InputConfig()).files
    assert [group.num_rows for group in file.row_groups] == [2, 1]
    first, second = (group.num_bytes for group in file.row_groups)
    assert 40_000 <= first < 40_200
    assert 5000 <= second < 5200


def test_scan_counts_token_ids_exactly(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", ids=pa.array([[1] * 700, [2] * 300, [3] * 5], pa.list_(pa.int64())))
    found = scan(find_files(str(tmp_path)), InputConfig(tokens_column="ids"))
    plan = make_plan(found.files, shard_tokens=10_000)
    assert plan.estimated_tokens == 1005


def test_scan_keeps_broken_files_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.parquet", text=["x"])
    (tmp_path / "b.parquet").write_bytes(b"PAR1PAR1")
    write(tmp_path / "c.parquet", body=["x"])
    with caplog.at_level(logging.WARNING):
        found = scan(find_files(str(tmp_path)), InputConfig())
    assert [file.error is None for file in found.files] == [True, False, True]
    assert "becomes an error row: b.parquet: expected a Parquet file" in caplog.text
    assert "c.parquet: its rows become error rows: input.text_column=text: found no such column; the columns are body" in caplog.text


def test_an_input_of_which_no_file_can_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "b.parquet").write_text("doc,text\n1,one\n")
    with pytest.raises(InputError, match=r"^b\.parquet: expected a Parquet file: "):
        scan(find_files(str(tmp_path)), InputConfig())
    (tmp_path / "c.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"^none of the 2 input files can be read; the first: b\.parquet: expected a Parquet file: "):
        scan(find_files(str(tmp_path)), InputConfig())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (InputConfig(), r"x\.parquet: input\.text_column=text: found no such column; the columns are body, key, nest, ids"),
        (InputConfig(text_column="key"), r"input\.text_column=key: expected strings, found int64"),
        (InputConfig(text_column="ids"), r"for token ids set input\.tokens_column"),
        (InputConfig(text_column="body", id_column="kay"), r"input\.id_column=kay: found no such column; the columns are body"),
        (InputConfig(text_column="body", id_column="nest"), r"input\.id_column=nest: expected one value a row, found struct"),
        (InputConfig(text_column="body", passthrough=["key", "nope"]), r"input\.passthrough=nope: found no such column"),
        (InputConfig(tokens_column="body"), r"input\.tokens_column=body: expected lists of integers, found string"),
        (InputConfig(tokens_column="nope"), r"input\.tokens_column=nope: found no such column"),
    ],
)
def test_columns_that_are_nowhere_end_the_run_before_it_starts(tmp_path: Path, config: InputConfig, message: str) -> None:
    write(tmp_path / "x.parquet", body=["t"], key=[1], nest=[{"a": 1}], ids=[[1]])
    with pytest.raises(InputError, match=message):
        scan(find_files(str(tmp_path)), config)


def test_files_out_of_reach_end_the_run_only_if_all_are(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", text=["x"])
    (tmp_path / "b.parquet").symlink_to(tmp_path / "nowhere")
    found = find_files(str(tmp_path))
    assert [file.error is None for file in scan(found, InputConfig()).files] == [True, False]
    with pytest.raises(InputError, match=r"^b\.parquet: .*No such file"):
        scan(found[1:], InputConfig())


def test_passthrough_is_nullable_and_without_field_ids(tmp_path: Path) -> None:
    fields = [pa.field("text", pa.string()), pa.field("n", pa.int8(), nullable=False, metadata={b"PARQUET:field_id": b"7"})]
    pq.write_table(pa.table({"text": ["x"], "n": pa.array([1], pa.int8())}, pa.schema(fields)), tmp_path / "x.parquet")
    found = scan(find_files(str(tmp_path)), InputConfig(passthrough=["n"]))
    assert found.passthrough.equals(pa.schema([("n", pa.int8())]), check_metadata=True)


# The fingerprint.

FILES = [SourceFile("/in/x.parquet", "x.parquet", 10, "mtime_ns:1", ()), SourceFile("/in/y.parquet", "y.parquet", 20, "mtime_ns:2", ())]


def facts(config: JobConfig | None = None, files: list[SourceFile] = FILES, **more: Any) -> dict[str, Any]:
    given = {"model": {"hash": "abc", "tokenizer": "def"}, "on": ("cpu", "torch", None), "versions": {"longscan": "0.1.0"}} | more
    return run_facts(config or JobConfig(), files, **given)


def test_equal_facts_have_equal_fingerprints_wherever_the_input_lies() -> None:
    moved = [replace(file, path=f"s3://k:s3cr3t@b/{file.name}") for file in FILES]
    assert facts(files=moved) == facts()
    assert fingerprint(facts(files=moved)) == fingerprint(facts())
    assert fingerprint(json.loads(json.dumps(facts()))) == fingerprint(facts())
    assert explain_difference(facts(), facts(files=moved)) == []


def changed(path: str, value: Any) -> JobConfig:
    config = JobConfig()
    config.task.name = "embed_score"
    place: Any = config
    *above, name = path.split(".")
    for part in above:
        place = getattr(place, part)
    setattr(place, name, value)
    return config


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("task.embedding.pooling", ["max"], 'task.embedding.pooling: "auto" -> ["max"]'),
        ("task.embedding.normalize", False, 'task.embedding.normalize: "auto" -> false'),
        ("task.embedding.window_tokens", 512, "task.embedding.window_tokens: null -> 512"),
        ("task.score.first_token", "skip", 'task.score.first_token: "auto" -> "skip"'),
        ("model.dtype", "float32", 'model.dtype: "auto" -> "float32"'),
        ("model.append_eos", True, 'model.append_eos: "auto" -> true'),
        ("input.text_column", "body", 'input.text_column: "text" -> "body"'),
        ("input.id_column", "key", 'input.id_column: null -> "key"'),
        ("input.passthrough", ["a"], 'input.passthrough: [] -> ["a"]'),
        ("engine.segment_tokens", 4096, "engine.segment_tokens: 8192 -> 4096"),
        ("limit", 5, "limit: null -> 5"),
        ("seed", 1, "seed: 0 -> 1"),
    ],
)
def test_every_key_that_changes_results_changes_the_fingerprint_and_is_named(key: str, value: Any, line: str) -> None:
    old, new = facts(changed("seed", 0)), facts(changed(key, value))
    assert fingerprint(old) != fingerprint(new)
    assert explain_difference(old, new) == [line]


@pytest.mark.parametrize(
    ("on", "line"),
    [
        (("cuda", "torch", None), 'device: "cpu" -> "cuda" (no key)'),
        (("cpu", "cutile", None), 'engine.backend: "torch" -> "cutile"'),
        (("cpu", "torch", 8), "engine.span_tiles: null -> 8 (no key)"),
    ],
)
def test_what_a_run_computes_on_is_in_the_fingerprint(on: tuple[str, str, int | None], line: str) -> None:
    assert fingerprint(facts()) != fingerprint(facts(on=on))
    assert explain_difference(facts(), facts(on=on)) == [line]


@pytest.mark.parametrize("key", ["output.overwrite", "cluster.mode", "dry_run", "max_errors", "engine.lanes", "engine.checkpoint_tokens"])
def test_keys_that_change_no_result_are_not_in_it(key: str) -> None:
    assert facts(changed(key, "else")) == facts(changed("seed", 0))


def test_only_the_parts_of_the_task_that_is_done_count() -> None:
    config = changed("task.name", "embed")
    config.task.score.first_token = "skip"
    assert facts(config) == facts(changed("task.name", "embed"))
    ids = changed("input.tokens_column", "ids")
    ids.input.text_column = "whatever"
    assert facts(ids) == facts(changed("input.tokens_column", "ids"))
    assert explain_difference(facts(changed("seed", 0)), facts(ids)) == [
        'input.text_column: "text" -> not set',
        'input.tokens_column: not set -> "ids"',
    ]


def test_what_changed_of_model_backend_and_versions() -> None:
    new = facts(model={"hash": "xyz", "tokenizer": "def"}, on=("cpu", "cutile", None), versions={"longscan": "0.1.0", "ssd.tuning": "3"})
    assert explain_difference(facts(), new) == [
        'engine.backend: "torch" -> "cutile"',
        'model.hash: "abc" -> "xyz" (no key)',
        'versions.ssd.tuning: not set -> "3" (no key)',
    ]


def test_of_another_task_its_name_is_told_and_what_does_not_follow_from_it() -> None:
    """Its own settings, and the token before each document that it wants or does not want, are no keys to be set back."""
    score, embed = changed("task.name", "score"), changed("task.name", "embed")
    embed.seed = 1
    with_context = {"hash": "abc", "context_id": 0}
    found = explain_difference(facts(score, model=with_context), facts(embed, model=with_context | {"context_id": None}))
    assert found == ["task: score -> embed", "seed: 0 -> 1"]


def test_what_changed_of_the_files() -> None:
    x, y = FILES
    new = [replace(x, size=11, version="mtime_ns:9"), SourceFile("/in/z", "z.parquet", 1, "", ())]
    assert explain_difference(facts(), facts(files=new)) == [
        "input file x.parquet changed size: 10 -> 11 bytes",
        "input file y.parquet is gone",
        "input file z.parquet is new",
    ]
    for was, now, said in (
        (
            "mtime_ns:1796048751437325112",
            "mtime_ns:1796048812000000007",
            "2026-11-30 14:25:51 UTC -> 2026-11-30 14:26:52 UTC; if its content is what it was, "
            "touch -d '2026-11-30 14:25:51.437325112 UTC' y.parquet gives it its time again",
        ),
        (
            "mtime_ns:2",
            "mtime_ns:3",
            "1970-01-01 00:00:00.000000002 UTC -> 1970-01-01 00:00:00.000000003 UTC; if its content is what it was, "
            "touch -d '1970-01-01 00:00:00.000000002 UTC' y.parquet gives it its time again",
        ),
        ("LastModified:1796048751.5", "LastModified:1796048812.0", "2026-11-30 14:25:51 UTC -> 2026-11-30 14:26:52 UTC"),
        ("LastModified:7.25", "LastModified:7.5", "1970-01-01 00:00:07.25 UTC -> 1970-01-01 00:00:07.5 UTC"),
        ("ETag:1234", "ETag:1235", "ETag:1234 -> ETag:1235"),
        ("mtime_ns:99999999999999999999999999", "", "mtime_ns:99999999999999999999999999 -> "),
    ):
        old, new_one = (facts(files=[x, replace(y, version=version)]) for version in (was, now))
        assert explain_difference(old, new_one) == [f"input file y.parquet was modified: {said}"]
    assert explain_difference(facts(), facts(files=[y, x])) == ["input files come in another order"]
    many = [SourceFile("", f"{i}.parquet", 1, "", ()) for i in range(50)]
    lines = explain_difference(facts(files=[]), facts(files=many))
    assert len(lines) == 6
    assert lines[-1] == "and 45 more input files"


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["", "a", "b"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)),
    max_leaves=4,
)
some_facts = st.dictionaries(st.sampled_from(["a", "b", "model"]), json_values, max_size=3)


@given(old=some_facts, new=some_facts)
def test_a_difference_is_explained_if_and_only_if_there_is_one(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert bool(explain_difference(old, new)) == (fingerprint(old) != fingerprint(new))


def test_provenance_is_the_facts_without_the_files() -> None:
    kept = provenance(facts())
    assert kept["fingerprint"] == fingerprint(facts())
    assert kept["num_input_files"] == 2
    assert "files" not in kept
    assert kept["task"]["embedding"]["pooling"] == "auto"
