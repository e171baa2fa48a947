"""Words on the command line become a configuration, or one clear error; paths arrive as they were typed."""

from __future__ import annotations

import subprocess
import sys
from itertools import cycle, islice
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from longscan.jobs.compose import AS_TYPED, OPTIONAL, all_keys, compose_job, spelled_keys
from longscan.jobs.run import main
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ConfigError
from longscan.pipeline.rules import validate
from waiting import HANG_S

JOB = ("model.path=M", "input.path=I", "output.path=O")


def test_defaults_of_the_yaml_files_are_those_of_the_schema() -> None:
    config = compose_job(JOB)
    plain = JobConfig()
    plain.model.path, plain.input.path, plain.output.path = "M", "I", "O"
    assert config == plain


def test_without_an_input_it_is_the_demo() -> None:
    config = compose_job([])
    assert (config.model.path, config.input.path, config.output.path) == ("demo", "demo", "longscan-demo")
    assert config.task.name == "embed_score"
    assert config.task.embedding.window_tokens == config.task.score.window_tokens == 1024
    assert config.cluster.mode == "inprocess"
    assert config.input.id_column == "title"
    assert "held_out" in config.input.passthrough
    validate(config)


def test_the_demo_takes_words_too() -> None:
    config = compose_job(["task=score", "output.path=/x", "cluster=local", "limit=2"])
    assert (config.task.name, config.output.path, config.cluster.mode, config.limit) == ("score", "/x", "local", 2)
    assert config.input.path == "demo"


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("task=embed_score", lambda c: c.task.name == "embed_score"),
        ("task=score", lambda c: c.task.scores and not c.task.embeds),
        ("cluster=ray", lambda c: c.cluster.mode == "ray"),
        ("cluster=inprocess", lambda c: c.cluster.mode == "inprocess"),
        ("cluster.workers=[1,4]", lambda c: c.cluster.workers == [1, 4]),
        ("cluster.workers=3", lambda c: c.cluster.workers == 3),
        ("task.embedding.pooling=[mean,last]", lambda c: c.task.embedding.pooling == ["mean", "last"]),
        ("engine.lanes=7", lambda c: c.engine.lanes == 7),
        ("dry_run=true", lambda c: c.dry_run is True),
        ("model.add_bos=false", lambda c: c.model.add_bos is False),
        ("input.passthrough=[a,'b c']", lambda c: c.input.passthrough == ["a", "b c"]),
    ],
)
def test_words(word: str, read: object) -> None:
    assert callable(read)
    assert read(compose_job([*JOB, word]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["taks=embed"], ["taks", "did you mean task?"]),
        (["input.paht=x"], ["input.paht", "did you mean input.path?"]),
        (["task.embeding.pooling=[mean]"], ["task.embeding", "did you mean task.embedding?"]),
        (["dryrun=true"], ["dryrun: no such key; did you mean dry_run?"]),
        (["pooling=last"], ["pooling: no such key; did you mean task.embedding.pooling or task.classify.pooling?"]),
        (["task.pooling=last"], ["did you mean task.embedding.pooling or task.classify.pooling?"]),
        (["input.passthrough=id"], ["input.passthrough: expected a list, written [a,b]"]),
        (["output=o8"], ["output=o8: output is no key by itself; did you mean output.path=o8?"]),
        (["task=emb"], ["task=emb", "embed, embed_score, score", "did you mean task=embed?"]),
        (["cluster=loca"], ["cluster=loca", "did you mean cluster=local?"]),
        (["limit=many"], ["limit", "'many'", "Integer"]),
        (["task.score.per_token=maybe"], ["task.score.per_token", "maybe", "bool"]),
        (["input.passthrough=a"], ["input.passthrough", "list"]),
        (["input.passthrough=[a"], ["input.passthrough=[a", "quote"]),
        (["engine.lanes=a=b"], ["engine.lanes=a=b", "quote"]),
        (["input.path"], ["key=value", "'input.path'", "--help"]),
        (["+new=1"], ["key=value", "'+new=1'"]),
        (["hydra.run.dir=x"], ["hydra.run.dir=x"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_what_is_wrong_is_told_in_a_line(words: list[str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_job([*JOB, *words])
    message = str(caught.value)
    assert all(part in message for part in says), message
    assert "\n" not in message


@pytest.mark.parametrize("missing", ["output.path"])
def test_a_missing_value_is_told(missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"set {missing}=FOLDER"):
        validate(compose_job([word for word in JOB if not word.startswith(missing)]))


ODD = (
    "/data/date=2024-01-01/x.parquet",
    "/d/x,y.parquet",
    "s3://b/{a,b}/[0-9]*.parquet?x=~1#y",
    " ${oc.env:HOME} 'quoted\" \\ \\\\ ",
    "/Übung/日本語(1)",
    "nullx",
    "true",
    "1e3",
    "a\nb: [",
)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.text(min_size=1).filter(lambda value: value != "null"), min_size=len(AS_TYPED), max_size=len(AS_TYPED)))
@example(list(islice(cycle(ODD), len(AS_TYPED))))
@example(list(islice(cycle(reversed(ODD)), len(AS_TYPED))))
def test_values_of_paths_and_names_arrive_as_they_are_typed(values: list[str]) -> None:
    config = compose_job([f"{key}={value}" for key, value in zip(AS_TYPED, values, strict=True)])
    for key, value in zip(AS_TYPED, values, strict=True):
        assert attrgetter(key)(config) == value, key


def test_every_key_without_a_value_of_its_own_may_be_unset() -> None:
    assert {key for key in AS_TYPED if attrgetter(key)(JobConfig()) is None} <= set(OPTIONAL)


@pytest.mark.parametrize("key", OPTIONAL)
def test_null_unsets_what_may_be_unset(key: str) -> None:
    assert attrgetter(key)(compose_job([*JOB, f"{key}=null"])) is None


class TestConfigDir:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "my, café's {yaml}"
        (folder / "task").mkdir(parents=True)
        return folder

    def test_a_file_to_start_from(self, folder: Path) -> None:
        text = "defaults:\n  - config\n  - override task: score\n  - _self_\ninput:\n  path: ./für/x=1\nmax_errors: 3\n"
        (folder / "mine.yaml").write_text(text, "utf-8")
        for name in ("mine", "mine.yaml"):
            config = compose_job(["output.path=O", "limit=4"], config_dir=str(folder), config_name=name)
            assert (config.input.path, config.task.name, config.max_errors, config.limit) == ("./für/x=1", "score", 3, 4)

    def test_an_option_of_a_group(self, folder: Path) -> None:
        (folder / "task" / "mine.yaml").write_text("defaults:\n  - base\n  - _self_\nname: embed\nembedding:\n  pooling: [last]\n", "utf-8")
        config = compose_job([*JOB, "task=mine"], config_dir=str(folder))
        assert config.task.embedding.pooling == ["last"]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("input:\n  paht: x\n", ["input.paht", "mine.yaml", "did you mean input.path?"]),
            ("limit: many\n", ["limit", "many"]),
            ("input:\n path: [\n", ["YAML", "mine.yaml", "line"]),
        ],
        ids=["typo", "wrong type", "no YAML"],
    )
    def test_what_is_wrong_in_a_file(self, folder: Path, text: str, says: list[str]) -> None:
        (folder / "mine.yaml").write_text(f"defaults:\n  - config\n  - _self_\n{text}", "utf-8")
        with pytest.raises(ConfigError) as caught:
            compose_job([], config_dir=str(folder), config_name="mine")
        assert all(part in str(caught.value) for part in says), str(caught.value)

    def test_a_wrong_option_in_a_file(self, folder: Path) -> None:
        (folder / "mine.yaml").write_text("defaults:\n  - config\n  - override task: emb\n  - _self_\n", "utf-8")
        with pytest.raises(ConfigError, match=r"task=emb: expected one of .*did you mean task=embed"):
            compose_job([], config_dir=str(folder), config_name="mine")

    def test_no_such_file_or_folder(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="--config-name: found no other"):
            compose_job([], config_dir=str(folder), config_name="other")
        with pytest.raises(ConfigError, match="--config-dir: expected a folder"):
            compose_job([], config_dir=str(folder / "gone"))


def test_the_help_names_every_key() -> None:
    shown = {line.split("=")[0].strip() for line in spelled_keys().splitlines()}
    sections = {"model", "input", "task", "task.embedding", "task.score", "task.classify", "engine", "output", "cluster"}
    assert shown == set(all_keys()) - sections - {"task.name", "cluster.mode"}


def test_the_help_and_a_typo_load_no_torch() -> None:
    code = (
        "import sys\nfrom longscan.jobs.run import main\n"
        "assert main(['taks=x']) == 2\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'ray', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--dry-run", "did you mean dry_run=…?"),
        ("-m", "call it in a loop"),
        ("--multirun", "call it in a loop"),
        ("--cfg", "see longscan --help"),
    ],
)
def test_options_that_there_are_not(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([word, *JOB])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"unrecognized arguments: {word}" in said
    assert said.rstrip().endswith(hint)
