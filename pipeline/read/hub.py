"""`hf://datasets/<org>/<name>[@<revision>][/<file, folder, glob or configuration>]` -> Parquet files.

A data set that lies on the hub as Parquet is read where it lies. Any other is loaded through `datasets`, which runs no
code of the data set's, and kept as one Parquet file a split in the cache of `datasets`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from longscan.pipeline.errors import InputError
from longscan.pipeline.read.find import find_in_place
from longscan.pipeline.shards import SourceFile
from longscan.pipeline.storage.location import locate
from longscan.pipeline.storage.redaction import redact

_DATASET = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?:/(?P<rest>.*))?")


def find_on_hub(uri: str) -> list[SourceFile]:
    """The Parquet files of a data set on the hub, or those that `datasets` makes of it. InputError where neither works."""
    try:
        return find_in_place(locate(uri))
    except InputError as error:
        not_parquet = error
    found = _DATASET.fullmatch(uri.rstrip("/"))
    if found is None:
        raise InputError(f"{redact(uri)}: expected hf://datasets/<org>/<name>, alone or with a file, a folder or a glob. {not_parquet}")
    repo, revision, name = found["repo"], found["revision"], found["rest"] or None
    try:
        folder = as_parquet(repo, name=name, revision=revision)
    except Exception as error:  # `datasets` and what it loads with raise whatever they like
        reason = f"{type(error).__name__}: {redact(str(error))}"
        raise InputError(f"{not_parquet}; nor can `datasets` load {repo}: {reason}") from error
    return find_in_place(locate(str(folder)))


def as_parquet(repo: str, *, name: str | None = None, revision: str | None = None) -> Path:
    """Load a data set through `datasets` and return a folder with one Parquet file a split.

    The folder is named by the data's fingerprint: it is made once, whole, and found again by the next run.
    """
    import datasets

    splits: dict[str, Any] = datasets.load_dataset(repo, name=name, revision=revision)
    content = hashlib.sha256(repr([(split, data._fingerprint) for split, data in splits.items()]).encode()).hexdigest()
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "longscan" / f"{repo.strip('/').replace('/', '--')}-{content[:16]}"
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}-{secrets.token_hex(6)}")
    unfinished.mkdir(parents=True)
    try:
        for split, data in splits.items():
            data.to_parquet(unfinished / f"{split}.parquet")
        os.rename(unfinished, folder)
    except OSError:
        if not folder.exists():  # else somebody else was faster, with the same content
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
