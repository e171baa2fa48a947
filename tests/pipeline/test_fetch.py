"""Hub ids: what is fetched, of which commit, without a network, and what is said where it cannot be had. By a hub on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from checkpoint_formats import rewrite
from fake_hub import Hub, serving
from fakes import tiny_checkpoint, tiny_tokenizer
from huggingface_hub import close_session
from longscan.jobs.run import main
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ModelError
from longscan.pipeline.model import read_geometry
from longscan.pipeline.model.classify import HEAD_FILE
from longscan.pipeline.model.recipe import Recipe, read_recipe
from longscan.pipeline.plan.fetch import fetch_model, fetch_tokenizer
from longscan.pipeline.plan.resolve import pinned
from tiny_jobs import rows, texts, words, write_input


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub of this test's own, and an empty cache, whatever the environment says of proxies and of being offline."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    close_session()  # one that another test opened goes by the environment as it was
    with serving() as started:
        settings = {
            "ENDPOINT": started.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": started.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_PROGRESS_BARS": True,
            "HF_HUB_OFFLINE": False,
        }
        for name, value in settings.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield started
        close_session()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True, seed=1)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("newer"), tokenizer=True, seed=2)


def test_a_folder_comes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "someone" / "mamba2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert fetch_model("someone/mamba2", None).commit is None
    for key, fetch in (("model.revision", fetch_model), ("model.tokenizer_revision", fetch_tokenizer)):
        with pytest.raises(ModelError, match=rf"{key}: expected null, as .* is a folder on this machine, got 'main'"):
            fetch("someone/mamba2", "main")


def test_a_branch_a_tag_a_commit(hub: Hub, model: Path, newer: Path) -> None:
    first = hub.push("someone/mamba2", model)
    second = hub.push("someone/mamba2", newer)
    hub.branches["someone/mamba2"]["v1"] = first
    for revision, commit, source in ((None, second, newer), ("main", second, newer), ("v1", first, model), (first, first, model)):
        fetched = fetch_model("someone/mamba2", revision)
        assert fetched.commit == commit
        assert re.fullmatch(r"[0-9a-f]{40}", commit)
        assert (Path(fetched.folder) / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_configuration_is_pinned_to_commits(hub: Hub, model: Path, newer: Path) -> None:
    commit = hub.push("someone/mamba2", model)
    other = hub.push("someone/tokenizer", newer)
    config = JobConfig()
    config.model.path, config.model.tokenizer = "someone/mamba2", "someone/tokenizer"
    settled, fetched = pinned(config)
    assert (settled.model.revision, settled.model.tokenizer_revision, fetched.commit) == (commit, other, commit)
    assert config.model.revision is None
    hub.push("someone/mamba2", newer)
    assert pinned(settled)[1] == fetched, "main has moved, the run has not"


def test_pickles_are_fetched_where_there_is_nothing_else(hub: Hub, model: Path, tmp_path: Path) -> None:
    both = rewrite(model, tmp_path / "bin", "hugging_face_bin")
    hub.push("someone/pickled", both)
    fetched = Path(fetch_model("someone/pickled", None).folder)
    assert (fetched / "pytorch_model.bin").exists()
    assert read_geometry(fetched) == read_geometry(model)
    (both / HEAD_FILE).write_bytes(b"a classifier's heads, which are no model")
    hub.push("someone/classifier", both)
    fetched = Path(fetch_model("someone/classifier", None).folder)
    assert {"pytorch_model.bin", HEAD_FILE} <= {file.name for file in fetched.iterdir()}
    (both / HEAD_FILE).unlink()
    (both / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (both / "modeling.py").write_text("1 / 0")
    hub.push("someone/both", both)
    fetched = Path(fetch_model("someone/both", None).folder)
    assert sorted(file.name for file in fetched.iterdir() if file.suffix != ".json") == ["model.safetensors"], "no pickle, no code"


def test_the_files_of_sentence_transformers_come_along(hub: Hub, tmp_path: Path) -> None:
    """In the hub's cache they are links to blobs, those in folders too."""
    folder = tiny_checkpoint(tmp_path / "model", tokenizer=True)
    kinds = ("Transformer", "Pooling", "Normalize")
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": f"{n}_{kind}"} for n, kind in enumerate(kinds)]), "utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}', "utf-8")
    hub.push("someone/embedder", folder)
    fetched = Path(fetch_model("someone/embedder", None).folder)
    assert (fetched / "1_Pooling" / "config.json").is_symlink()
    assert read_recipe(fetched) == Recipe("max", True, True)


def test_a_tokenizer_is_fetched_without_weights(hub: Hub, model: Path) -> None:
    hub.push("someone/mamba2", model)
    names = {file.name for file in Path(fetch_tokenizer("someone/mamba2", None).folder).iterdir()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json"}


def test_without_a_network_the_cache_serves(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.push("someone/mamba2", model)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    offline = r"not whole in the hub's cache at .*cache, which alone is asked while HF_HUB_OFFLINE is set"
    with pytest.raises(ModelError, match=offline + ".*: hf download someone/mamba2$"):
        fetch_model("someone/mamba2", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    fetch_tokenizer("someone/mamba2", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=offline):
        fetch_model("someone/mamba2", None)  # the tokenizer alone is there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    online = fetch_model("someone/mamba2", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert fetch_model("someone/mamba2", None) == fetch_model("someone/mamba2", commit) == online
    with pytest.raises(ModelError, match=offline + ".*: hf download someone/mamba2 --revision v9$"):
        fetch_model("someone/mamba2", "v9")
    assert len(hub.asked) == asked


def test_what_the_hub_does_not_give_is_told(hub: Hub, model: Path) -> None:
    hub.push("someone/mamba2", model)
    hub.push("someone/gated", model)
    hub.gated.add("someone/gated")
    for path, revision, message in (
        ("someone/mamba2", "v9", "model.revision: expected a branch, a tag or a commit of someone/mamba2, and the hub has none named 'v9'"),
        ("someone/else", None, "no folder at 'someone/else', and the hub has nothing of that name"),
        ("someone/gated", None, "the hub gives someone/gated only to those it knows"),
        ("no folder/of mine at all/x", None, "model.path: expected a folder or a hub id, found no folder at 'no folder/of mine at all/x'$"),
        ("/gone", None, "model.path: expected a folder or a hub id, found no folder at '/gone'$"),
        ("", None, "model.path: expected a folder or a hub id, found no folder at ''"),
    ):
        with pytest.raises(ModelError, match=message):
            fetch_model(path, revision)
    with pytest.raises(ModelError, match=r"model\.tokenizer: expected a folder or a hub id, found no folder at 'someone/else'"):
        fetch_tokenizer("someone/else", None)


@pytest.mark.usefixtures("hub")
def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"the hub did not give someone/mamba2: (?!Got)[A-Z].*: hf download someone/mamba2$"):
        fetch_model("someone/mamba2", None)


def test_a_job_by_hub_id(hub: Hub, model: Path, newer: Path, tmp_path: Path) -> None:
    """Through the command, in processes of their own: online, offline from the cache, and after the branch has moved."""
    commit = hub.push("someone/mamba2", model)
    tokenizer = hub.push("someone/tokenizer", tiny_tokenizer(tmp_path / "tokenizer"))
    write_input(tmp_path / "in.parquet", texts(3))
    out = tmp_path / "out"

    def longscan(*more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "longscan.jobs.run", *words("someone/mamba2", tmp_path / "in.parquet", out, *more)]
        return subprocess.run(command, env=os.environ | environment | variables, capture_output=True, text=True)

    named = "model.tokenizer=someone/tokenizer"
    assert longscan(named, HF_HUB_OFFLINE="1").returncode == 2
    done = longscan(named)
    assert done.returncode == 0, done.stderr
    assert len(rows(out, "documents")) == 3
    (part,) = (out / "documents").iterdir()
    facts = json.loads(pq.read_schema(part).metadata[b"longscan"])
    assert (facts["model"]["commit"], facts["model"]["tokenizer"]["commit"]) == (commit, tokenizer)
    again = longscan(named, HF_HUB_OFFLINE="1")
    assert (again.returncode, "complete already" in again.stderr) == (0, True)
    moved = hub.push("someone/mamba2", newer)
    refused = longscan(named)
    assert refused.returncode == 2
    assert f'model.commit: "{commit}" -> "{moved}"' in refused.stderr
    pinned_again = longscan(named, f"model.revision={commit}")
    assert (pinned_again.returncode, "complete already" in pinned_again.stderr) == (0, True)


def test_no_code_of_a_repository_is_run(hub: Hub, tmp_path: Path) -> None:
    maps = {"AutoModel": "modeling.Model", "AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    folder = tiny_checkpoint(tmp_path / "folder", tokenizer=True, auto_map=maps)
    ran = tmp_path / "ran"
    for name in ("modeling.py", "tokenization.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w').close()\nclass Model: pass\nclass Config: pass\n", "utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings |= {"auto_map": {"AutoTokenizer": ["tokenization.Model", "tokenization.Model"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    hub.push("someone/hostile", folder)
    write_input(tmp_path / "in.parquet", texts(2))

    for path in ("someone/hostile", str(folder)):
        assert main(words(path, tmp_path / "in.parquet", tmp_path / path.replace("/", "-"))) == 0
    assert not ran.exists()
    exec((folder / "modeling.py").read_text("utf-8"), {})
    assert ran.exists(), "the code is as hostile as the test says"
