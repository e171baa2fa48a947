"""Documents that grow: runs that go on from the states of earlier ones give the bits of runs on the whole texts."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import tiny_checkpoint
from longscan.jobs.run import main
from longscan.pipeline.tokenize.cuts import Cuts
from longscan.pipeline.tokenize.texts import last_cut
from longscan.pipeline.wording import count, plural
from stopping import Stop, carries, stopped
from tiny_jobs import difference, rows, some_ids, success, table, texts, words, write_input

pytestmark = pytest.mark.usefixtures("one_thread")

SEGMENT = 64
EVERYTHING = ("task=embed_score", "task.embedding.window_tokens=192", "task.score.window_tokens=192", "task.score.per_token=true")
WINDOWS = "task.embedding.window_tokens=64"
TASKS = {
    "every_pooling": ("task=embed", "task.embedding.pooling=[mean,last,max,weighted_mean]", "task.embedding.window_tokens=128"),
    "everything": EVERYTHING,
    "bos": ("task=embed_score", "model.add_bos=true", "task.embedding.include_prompt=true", "task.embedding.pooling=[mean,max]"),
    "prompt": (
        "task=embed",
        "task.embedding.prompt_text=a prompt: ",
        "task.embedding.include_prompt=true",
        "task.embedding.window_tokens=64",
    ),
    "eos": (*EVERYTHING, "model.append_eos=true", "task.score.first_token=skip", "task.state_norm=true"),
    "tokens_column": (*EVERYTHING, "input.tokens_column=ids"),
    "resets": ("task=embed_score", "task.embedding.window_tokens=64", "engine.reset_tokens=192"),
}
KEYS = {"windows": "window_index", "tokens": "token_start"}


def versions(seed: int, count: int = 3) -> list[list[str]]:
    """Texts of one corpus as it grows: cut anywhere, also inside words and of whatever length, none at all included."""
    chance = random.Random(seed)
    whole = [" ".join(texts(n, seed=n)) for n in (3, 1, 6, 2, 9, 4, 1)]
    ends = [[*sorted(chance.randrange(len(text)) for _ in range(count - 1)), len(text)] for text in whole]
    return [[text[: of_text[version]] for text, of_text in zip(whole, ends, strict=True)] for version in range(count)]


def write(path: Path, corpus: Sequence[str | None], names: Sequence[str] | None = None) -> Path:
    return write_input(path, corpus, row_group=3, ids=some_ids(corpus), name=names or [f"document {n}" for n in range(len(corpus))])


def job(model: Path, source: Path, output: Path, task: str, *more: str) -> list[str]:
    sizes = ("output.shard_tokens=500", "cluster=inprocess", "input.id_column=name")
    return words(model, source, output, *sizes, *TASKS[task], *more)


def run(model: Path, source: Path, output: Path, task: str, *more: str) -> Path:
    assert main(job(model, source, output, task, *more)) == 0
    return output


def states(output: Path) -> dict[str, int]:
    return {row["doc_id"]: row["position"] for row in table(output, "states").select(["doc_id", "position"]).to_pylist()}


def assert_same_documents(output: Path, expected: Path) -> None:
    found, wanted = table(output, "documents"), table(expected, "documents")
    found = found.drop_columns(["continued_at"] if "continued_at" in found.schema.names else [])
    assert found.equals(wanted), f"{output}: {difference(found, wanted)}"


def assert_same(runs: Sequence[Path], expected: Path) -> None:
    """The documents of the last run are those expected; of the other tables the rows of all runs, the newest of each, are."""
    assert_same_documents(runs[-1], expected)
    for name, key in KEYS.items():
        if not (expected / name).exists():
            continue
        newest: dict[tuple[str, int], Any] = {}
        for output in runs:
            newest |= {(row["doc_id"], row[key]): repr(row) for row in rows(output, name)}
        assert newest == {(row["doc_id"], row[key]): repr(row) for row in rows(expected, name)}, name


@pytest.mark.parametrize("task", TASKS)
def test_a_chain_of_runs_gives_the_bits_of_runs_on_the_whole_texts(task: str, model: Path, tmp_path: Path) -> None:
    runs: list[Path] = []
    for n, corpus in enumerate(versions(seed=list(TASKS).index(task))):
        source = write(tmp_path / f"in{n}" / "in.parquet", corpus)
        more = [f"input.state_path={runs[-1]}"] if runs else []
        with pytest.MonkeyPatch.context() as patch:
            counted = Stop(patch, 1 << 40)
            runs.append(run(model, source, tmp_path / f"out{n}", task, "output.keep_state=true", *more))
        if n or task == "everything":
            whole = run(model, source, tmp_path / f"whole{n}", task)
            assert_same(runs, whole)
        lengths = {row["doc_id"]: row["num_tokens"] for row in rows(runs[-1], "documents")}
        kept = states(runs[-1])
        loose = 12  # of so many tokens at most, after these texts' last safe cut
        assert all(0 < at < lengths[name] and at % SEGMENT == 0 for name, at in kept.items())
        assert all(length - kept.get(name, 0) <= SEGMENT + loose for name, length in lengths.items())
        told = carries(runs[-1])
        assert told["states_kept"] == len(kept)
        if n:
            before = states(runs[-2])
            begun = {row["doc_id"]: row["continued_at"] for row in rows(runs[-1], "documents")}
            assert begun == {name: before.get(name, 0) for name in lengths}
            assert counted.seen == sum(lengths.values()) - sum(before.values())
            assert (told["continued_documents"], told["continued_tokens"]) == (len(before), sum(before.values()))
            assert told["states_left_out"] == 0
            metrics = json.loads((runs[-1] / "_run" / "metrics.json").read_text())
            assert metrics["tokens_per_second"] == pytest.approx(counted.seen / metrics["seconds"], abs=0.06)
            windows = rows(runs[-1], "windows") if (runs[-1] / "windows").exists() else []
            assert all(row["token_end"] > begun[row["doc_id"]] for row in windows)
    assert len(kept) >= 5


@pytest.fixture(scope="module")
def grown(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that kept its states, the corpus as it has grown since, and a run on the whole of that."""
    folder = tmp_path_factory.mktemp("grown")
    before = [" ".join(texts(n, seed=n)) for n in (12, 1, 8, 5)]
    after = [text + f" and then, {n} " + " ".join(texts(4, seed=10 + n)) for n, text in enumerate(before)]
    first, second = write(folder / "in0" / "in.parquet", before), write(folder / "in1" / "in.parquet", after)
    return {
        "source": second,
        "kept": run(model, first, folder / "kept", "everything", "output.keep_state=true"),
        "whole": run(model, second, folder / "whole", "everything"),
    }


def copied(output: Path, folder: Path) -> Path:
    shutil.copytree(output, folder / "kept")
    return folder / "kept"


def halfway(text: memoryview, cuts: Cuts) -> int:
    """A safe cut, as if there were none in the text's second half."""
    return last_cut(text[: text.nbytes // 2], cuts)


@pytest.mark.parametrize(("crash", "early"), [(False, False), (True, False), (True, True)], ids=["sigterm", "crash", "behind"])
def test_a_run_that_goes_on_from_states_is_stopped_anywhere_and_goes_on(
    crash: bool, early: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one shard, so that rows of several documents are in its journal. Texts that can be cut early alone have carries behind that."""
    if early:
        monkeypatch.setattr("longscan.pipeline.tokenize.documents.last_cut", halfway)
    task, more = "everything", ("output.keep_state=true", "engine.checkpoint_tokens=64", "output.shard_tokens=100000")
    before = [" ".join(texts(n, seed=n)) for n in (12, 1, 8, 5)]
    after = [text + " " + " ".join(texts(30 - 5 * n, seed=10 + n)) for n, text in enumerate(before)]
    kept = run(model, write(tmp_path / "in0" / "in.parquet", before), tmp_path / "kept", task, *more)
    source = write(tmp_path / "in1" / "in.parquet", after)
    whole = run(model, source, tmp_path / "whole", task, *more)
    command = job(model, source, tmp_path / "out", task, *more, f"input.state_path={kept}")
    chance = random.Random(f"{crash} {early}")
    stops = 0
    for _ in range(4):
        if stopped(command, chance.randrange(100, 2500), crash=crash) < 0:
            break
        stops += 1
    else:
        assert main(command) == 0
    assert stops
    assert_same([kept, tmp_path / "out"], whole)
    # What is kept is the same bits, whatever happened on the way; the digest of all is in the frame.
    assert table(tmp_path / "out", "states").sort_by("doc_id").equals(table(whole, "states").sort_by("doc_id"))
    begun = {row["doc_id"]: row["continued_at"] for row in rows(tmp_path / "out", "documents")}
    assert begun == {name: states(kept).get(name, 0) for name in begun}
    told = carries(tmp_path / "out")
    assert told["continued_tokens"] == sum(begun.values())
    assert told["states_kept"] == len(states(whole))


def rewrite(output: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    for part in (output / "states").glob("*.parquet"):
        found = pq.read_table(part)
        changed = found.to_pylist()
        change(changed)
        pq.write_table(pa.Table.from_pylist(changed, schema=found.schema), part)


def tear(output: Path) -> None:
    def torn(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["state"] = row["state"][:-10]

    rewrite(output, torn)


def flip(output: Path) -> None:
    def flipped(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            middle = len(row["state"]) // 2
            row["state"] = row["state"][:middle] + bytes([row["state"][middle] ^ 1]) + row["state"][middle + 1 :]

    rewrite(output, flipped)


def swap(output: Path) -> None:
    """Give each document the state of another, under the prefix that is its own."""
    states = [row["state"] for row in rows(output, "states")]

    def swapped(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["state"] = states[states.index(row["state"]) - 1]

    rewrite(output, swapped)


def cut_parts(output: Path) -> None:
    for part in (output / "states").glob("*.parquet"):
        part.write_bytes(part.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "warning", "left_out"),
    [
        (tear, "is not whole", 4),
        (flip, "is not whole", 4),
        (swap, "the document's content has changed", 4),
        (cut_parts, "these states cannot be read", 0),
    ],
)
def test_states_that_are_torn_or_another_documents_are_told_of_and_not_used(
    damage: Callable[[Path], None],
    warning: str,
    left_out: int,
    model: Path,
    grown: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = copied(grown["kept"], tmp_path)
    damage(kept)
    output = run(model, grown["source"], tmp_path / "out", "everything", f"input.state_path={kept}")
    assert warning in capsys.readouterr().err
    assert_same([output], grown["whole"])
    assert carries(output)["states_left_out"] == (len(states(grown["kept"])) if left_out else 0)
    assert carries(output)["continued_documents"] == 0


def test_a_document_that_changed_before_its_last_cut_begins_anew(
    model: Path, grown: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one whose last words alone changed, one that is new, and one that is what it was, each as far as it can."""
    corpus = pq.read_table(grown["source"])["text"].to_pylist()
    old = [" ".join(texts(n, seed=n)) for n in (12, 1, 8, 5)]
    changed = ["x" + corpus[0][1:], old[1], old[2].rstrip() + "ward", corpus[3], " ".join(texts(6, seed=7)), None, old[3][:200]]
    names = [*(f"document {n}" for n in range(4)), "new", "null", "document 3"]
    source = write(tmp_path / "in.parquet", changed, names)
    output = run(model, source, tmp_path / "out", "everything", f"input.state_path={grown['kept']}", "max_errors=1")
    whole = run(model, source, tmp_path / "whole", "everything", "max_errors=1")
    assert_same_documents(output, whole)
    told = capsys.readouterr().err
    assert told.count("does not begin any more with what it was made of") == 2
    assert "'document 0': begins anew" in told
    kept = states(grown["kept"])
    begun = [row["continued_at"] for row in rows(output, "documents")]
    assert begun == [0, kept.get("document 1", 0), kept["document 2"], kept["document 3"], 0, 0]
    assert carries(output)["states_left_out"] == 2


def test_documents_that_share_an_id_each_find_their_own(model: Path, tmp_path: Path) -> None:
    before = [f"{n} " + " ".join(texts(4 + n, seed=n)) for n in range(3)]
    after = [text + " and more of it" for text in reversed(before)]
    kept = run(model, write(tmp_path / "in0.parquet", before, ["same"] * 3), tmp_path / "kept", "everything", "output.keep_state=true")
    source = write(tmp_path / "in1.parquet", after, ["same"] * 3)
    output = run(model, source, tmp_path / "out", "everything", f"input.state_path={kept}")
    assert_same_documents(output, run(model, source, tmp_path / "whole", "everything"))
    assert all(row["continued_at"] for row in rows(output, "documents"))


def test_readers_list_what_is_kept(grown: dict[str, Path]) -> None:
    part = sorted((grown["kept"] / "states").glob("*.parquet"))[0]
    listed = pq.read_table(part, columns=["doc_id", "position", "prefix_length", "prefix_sha256"])
    assert listed.num_rows
    text = dict(zip((f"document {n}" for n in range(4)), (" ".join(texts(n, seed=n)) for n in (12, 1, 8, 5)), strict=True))
    for row in listed.to_pylist():
        prefix = text[row["doc_id"]].encode()[: row["prefix_length"]]
        assert hashlib.sha256(prefix).hexdigest() == row["prefix_sha256"]
    provenance = json.loads(pq.read_schema(part).metadata[b"longscan"])
    assert provenance["fingerprint"] == success(grown["kept"])["fingerprint"]
    assert provenance["output"] == {"keep_state": True}
    frame = pq.read_table(part)["state"][0].as_py()
    assert frame[:4] == b"LSf1"


def test_a_part_of_states_that_is_gone_is_made_anew_and_overwrite_removes_all(model: Path, grown: dict[str, Path], tmp_path: Path) -> None:
    kept = copied(grown["kept"], tmp_path)
    expected = table(kept, "states")
    (kept / "_SUCCESS").unlink()
    next((kept / "states").glob("*.parquet")).unlink()
    command = job(model, grown["source"].parent.parent / "in0", kept, "everything", "output.keep_state=true")
    assert main(command) == 2
    assert main(command) == 0
    assert table(kept, "states").equals(expected)
    assert main([*command[:-1], "output.overwrite=true"]) == 0
    assert not (kept / "states").exists()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("engine.segment_tokens=128",), "engine.segment_tokens: 64 -> 128"),
        (("engine.reset_tokens=64",), "engine.reset_tokens: null -> 64"),
        (("model.decay_scale=0.5",), "model.decay_scale: 1.0 -> 0.5"),
        (("model.dtype=bfloat16",), 'model.dtype: "float32" -> "bfloat16"'),
        (("model.parse_special=true",), "tokenizer.parse_special: false -> true"),
        (("task.embedding.pooling=[max]",), "task.embedding.pooling"),
        (("task.score.first_token=skip",), "task.score.first_token"),
        (("task.embedding.window_tokens=64", "task.score.window_tokens=64"), "window_tokens: 192 -> 64"),
        (("input.tokens_column=ids",), "tokenizer"),
        (("task=embed",), "task: embed_score -> embed"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_states_of_other_settings_are_refused_with_what_differs(
    more: tuple[str, ...], told: str, model: Path, grown: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = job(model, grown["source"], tmp_path / "out", "everything", f"input.state_path={grown['kept']}", *more)
    command = command if more != ("task=embed",) else [word for word in command if not word.startswith("task.score")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "input.state_path: expected a run whose states this one can go on from" in error
    assert told in error
    assert not (tmp_path / "out").exists()


def test_states_of_another_model_are_refused(grown: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny_checkpoint(tmp_path / "other", tokenizer=True, seed=1)
    assert main(job(other, grown["source"], tmp_path / "out", "everything", f"input.state_path={grown['kept']}")) == 2
    assert "model.content: " in capsys.readouterr().err


def test_settings_that_change_no_state_may_change(model: Path, grown: dict[str, Path], tmp_path: Path) -> None:
    more = ("task.embedding.normalize=false", "task.embedding.dtype=float16", "model.append_eos=true", "input.passthrough=[ids]")
    output = run(model, grown["source"], tmp_path / "out", "everything", *more, f"input.state_path={grown['kept']}")
    assert_same_documents(output, run(model, grown["source"], tmp_path / "whole", "everything", *more))
    assert carries(output)["continued_documents"] == len(states(grown["kept"]))


def test_what_is_no_run_that_kept_states_is_refused(
    model: Path, grown: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, *more: str) -> str:
        command = job(model, grown["source"], tmp_path / "out", "everything", f"input.state_path={path}", *more)
        assert main(command) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "which is no run of longscan" in refused(tmp_path)
    assert "which was made without it" in refused(grown["whole"])
    assert "which is output.path" in refused(grown["kept"], f"output.path={grown['kept']}")
    unfinished = copied(grown["kept"], tmp_path)
    (unfinished / "_SUCCESS").unlink()
    assert "which is not finished" in refused(unfinished)
    assert "input.id_column: expected a column, with input.state_path" in refused(grown["kept"], "input.id_column=null")


@pytest.mark.parametrize(
    ("facts", "told"), [({"engine": None}, "made by another version"), ([1], "cannot be read"), (None, "cannot be read")]
)
def test_settings_that_are_not_this_versions_are_refused(
    facts: Any, told: str, model: Path, grown: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = copied(grown["kept"], tmp_path)
    file = kept / "_run" / "fingerprint.json"
    whole = json.loads(file.read_text())["facts"]
    file.write_text(json.dumps({"facts": {**whole, **facts} if isinstance(facts, dict) else facts}))
    assert main(job(model, grown["source"], tmp_path / "out", "everything", f"input.state_path={kept}")) == 2
    assert told in capsys.readouterr().err


def test_a_run_whose_states_are_gone_is_refused_but_for_one_that_has_begun(
    model: Path, grown: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who named it wants to pay for what is new alone. States may go once the run that went on from them is done."""
    kept = copied(grown["kept"], tmp_path)
    command = job(model, grown["source"], tmp_path / "out", "everything", f"input.state_path={kept}")
    parts = sorted((kept / "states").glob("*.parquet"))
    parts[0].rename(tmp_path / "part")
    assert main(command) == 2
    assert f"holds {len(parts) - 1} of {len(parts)} parts" in capsys.readouterr().err
    (tmp_path / "part").rename(parts[0])
    assert stopped(command, 300) >= 0
    shutil.rmtree(kept / "states")
    assert main(job(model, grown["source"], tmp_path / "other", "everything", f"input.state_path={kept}")) == 2
    assert "holds no part" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert main(command) == 0
    assert "states are gone" in capsys.readouterr().err
    assert_same_documents(tmp_path / "out", grown["whole"])
    assert main(command) == 0, "it is done"


def test_the_output_by_another_name_is_no_earlier_run(
    model: Path, grown: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be removed, and then asked for its states."""
    kept = copied(grown["kept"], tmp_path)
    (tmp_path / "link").symlink_to(kept)
    more = (f"input.state_path={tmp_path / 'link'}", "output.keep_state=true", "output.overwrite=true")
    assert main(job(model, grown["source"], kept, "everything", *more)) == 2
    assert "which is output.path" in capsys.readouterr().err
    assert table(kept, "states").equals(table(grown["kept"], "states"))


def test_a_dry_run_says_what_states_will_take(
    model: Path, grown: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(job(model, grown["source"], tmp_path / "out", "everything", "output.keep_state=true", "dry_run=true")) == 0
    # SSM: 2 layers of 128 x 16 in fp32; tails: 3 of 160 channels.
    one = 2 * (4 * 128 * 16 + 4 * 3 * 160)
    assert one == 20224
    assert "states      at most 4 kept, of 20.2 kB each: 80.9 kB" in capsys.readouterr().out


def test_a_dry_run_says_what_an_earlier_runs_states_stand_for(
    model: Path, grown: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (f"input.state_path={grown['kept']}", "dry_run=true")
    assert main(job(model, grown["source"], tmp_path / "out", "everything", *more)) == 0
    kept = states(grown["kept"])
    assert f"continued   up to {count(sum(kept.values()))} tokens of {plural(len(kept), 'document')} lie" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
