"""Models and tokenizers, by path or by hub id -> folders on this machine, of one commit. No code in them is ever run.

A folder of the name comes before a hub id. Of a hub id a run takes one commit: whatever `main` points to when the run is
prepared is written into its configuration, so that every worker, and every later start, takes the same files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.classify import HEAD_FILE

TOKENIZER_FILES = ("*.json", "*.model", "tokenizer.model.*", "*.tiktoken", "merges.txt", "vocab.*")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")
PICKLES = ("pytorch_model*.bin",)
"""PyTorch's own files: fetched only where there are no others, as they often lie beside the same weights."""


@dataclass(frozen=True, slots=True)
class Fetched:
    folder: str
    commit: str | None = None
    """Of a hub id."""


def fetch_model(path: str, revision: str | None) -> Fetched:
    """The folder of a model with its tokenizer. revision: of a hub id: a branch, a tag or a commit; None for its main branch.

    Raises ModelError where there is neither a folder nor an answer of the hub, and nothing in its cache.
    """
    fetched = _fetch("model", path, revision, MODEL_FILES)
    files = Path(fetched.folder).glob("*.safetensors")
    if fetched.commit is not None and all(file.name == HEAD_FILE for file in files):
        return _fetch("model", path, fetched.commit, PICKLES)
    return fetched


def fetch_tokenizer(path: str, revision: str | None) -> Fetched:
    """The folder of a tokenizer, likewise."""
    return _fetch("tokenizer", path, revision, TOKENIZER_FILES)


def _fetch(what: str, path: str, revision: str | None, wanted: Sequence[str]) -> Fetched:
    keys = {"model": ("model.path", "model.revision"), "tokenizer": ("model.tokenizer", "model.tokenizer_revision")}
    key, pin = keys[what]
    if path and Path(path).is_dir():
        if revision is not None:
            raise ModelError(f"{pin}: expected null, as {key} is a folder on this machine, got {revision!r}; revisions are of hub ids")
        return Fetched(path)
    # Imported here because it takes a while, and a local folder needs none of it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    found = f"{key}: expected a folder or a hub id, found no folder at {path!r}"
    try:
        folder = Path(snapshot_download(path, revision=revision, allow_patterns=list(wanted)))
    except HFValidationError as error:
        raise ModelError(found) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{pin}: expected a branch, a tag or a commit of {path}, and the hub has none named {revision!r}") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{found}, and the hub gives {path} only to those it knows: ask for access there, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{found}, and the hub has nothing of that name that it shows to you; a private one needs HF_TOKEN") from error
    except LocalEntryNotFoundError as error:
        of = f" at revision {revision}" if revision else ""
        how = f"hf download {path}" + (f" --revision {revision}" if revision else "")
        if constants.HF_HUB_OFFLINE:
            raise ModelError(
                f"{found}, and {path}{of} is not whole in the hub's cache at {constants.HF_HUB_CACHE}, which alone is asked while "
                f"HF_HUB_OFFLINE is set. Unset it, or fetch it beforehand: {how}"
            ) from error
        raise ModelError(
            f"{found}, and the hub did not give {path}{of}: {_reason(error)}. Where it cannot be reached give a folder, or fetch it "
            f"beforehand, where it can: {how}"
        ) from error
    except Exception as error:  # the hub's client raises what its network library does
        raise ModelError(f"{found}, and the hub did not give it: {_reason(error)}") from error
    return Fetched(str(folder), folder.name)


def _reason(error: Exception) -> str:
    said = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return said.removeprefix("Got: ").rstrip(".")
