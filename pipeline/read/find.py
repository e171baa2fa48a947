"""What a user names as input -> the Parquet files that it stands for, each with its size and version.

A path may be a file, a folder (searched to its depths), a glob, or the URI of one. A name that is there is taken as it
is, whatever characters it holds; only one that is not there can be a glob. Names that begin with `_` or `.` are side
files by convention and skipped in folders and behind wildcards; so are the outputs of longscan's runs, which would make
documents of vectors and scores. Files come in the order of their names.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from longscan.pipeline.commit.ledger import RUN
from longscan.pipeline.errors import InputError
from longscan.pipeline.shards import SourceFile
from longscan.pipeline.storage.location import Location, children, exists, is_uri, locate
from longscan.pipeline.storage.redaction import redact
from longscan.pipeline.wording import plural

log = logging.getLogger(__name__)

SUFFIXES = (".parquet", ".pq", ".parq")
MAGIC = frozenset("*?[")
HUB = "hf://"

VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "oid", "mtime", "LastModified", "last_modified", "updated", "created")
"""Keys of fsspec's info that tell one version of a file from another, the most telling ones first."""

_PART = re.compile(r"(?:(?P<run>.*)/)?(?P<table>\w+)/part-\d{5}-of-\d{5}\.parquet")
"""A file that longscan may have written; it has where its run's folder says so."""


def find_files(path: str, *, exclude: Location | None = None) -> list[SourceFile]:
    """The input's files, in order, their footers not read yet. Files under `exclude` (the output) are left out.

    Raises InputError where nothing is there, or nothing that is Parquet (it says what is there instead), or where the input
    lies in `exclude`.
    """
    if path.startswith(HUB):
        from longscan.pipeline.read.hub import find_on_hub  # only here: it needs `datasets`, which takes seconds to import

        return find_on_hub(path)
    return find_in_place(locate(path), exclude=exclude)


def find_in_place(place: Location, *, exclude: Location | None = None) -> list[SourceFile]:
    """`find_files` of a location, whatever file system it lies on."""
    if exclude is not None and type(exclude.fs) is type(place.fs) and f"{spot(place)}/".startswith(f"{spot(exclude)}/"):
        raise InputError(f"output.path: expected a folder outside of the input, found {exclude}, in which the input lies ({place})")
    try:
        found = _search(place)
    except InputError:
        raise
    except Exception as error:  # each file system has exceptions of its own, for credentials and the like
        raise InputError(f"{place}: cannot be listed: {type(error).__name__}: {redact(str(error))}") from error
    if exclude is not None:
        inside = exclude.uri.rstrip("/") + "/"
        found = [file for file in found if not file.path.startswith(inside)]
    if not found:
        raise InputError(f"{place}: expected Parquet files ({', '.join(SUFFIXES)}), found only those of the output")
    return found


def spot(place: Location) -> str:
    """Of a file or folder, by whatever links it is reached."""
    return os.path.realpath(place.path) if place.is_local else place.path.rstrip("/")


def file_version(info: Mapping[str, Any]) -> str:
    """`<kind>:<value>` of a file's version as its file system tells it; empty where it tells none."""
    key = next((key for key in VERSION_KEYS if info.get(key) is not None), None)
    value = None if key is None else info[key]
    # Some file systems spell a time in one way in a listing, and in another when asked for one file.
    return "" if value is None else f"{key}:{value.timestamp() if isinstance(value, datetime) else value}"


def current_version(place: Location) -> tuple[int, str]:
    """Size and version of a file as they are now. Raises what its file system raises where it is not there."""
    if place.is_local:
        status = os.stat(place.path)
        return status.st_size, f"mtime_ns:{status.st_mtime_ns}"
    info = place.fs.info(place.path)
    return info.get("size") or 0, file_version(info)


def _search(place: Location) -> list[SourceFile]:
    kind = _kind(place)
    if kind == "file":
        return [_source(place, _name(place.uri), None)]
    if kind == "directory":
        return _in_folder(place)
    parts = place.path.rstrip("/").split("/")
    wild = next((i for i, part in enumerate(parts) if MAGIC & set(part)), None)
    if wild is None or place.uri.startswith(("http://", "https://")):
        raise _missing(place)
    return _by_glob(place, parts, wild)


def _kind(place: Location) -> str | None:
    if place.is_local:
        return "directory" if os.path.isdir(place.path) else "file" if os.path.exists(place.path) else None
    try:
        kind: str = place.fs.info(place.path)["type"]
    except FileNotFoundError:
        return None
    return kind


def _in_folder(folder: Location) -> list[SourceFile]:
    below = {name: info for name, info in _below(folder) if not _hidden(name)}
    parquet = sorted(name for name in below if name.lower().endswith(SUFFIXES))
    if not parquet:
        raise InputError(f"{folder}: expected Parquet files ({', '.join(SUFFIXES)}) in this folder, found {_census(below)}")
    own = _of_runs(folder, parquet)
    if len(own) == len(parquet):
        table = f"; to read its documents name {folder / 'documents'}" if exists(folder / "documents") else ""
        raise InputError(f"{folder}: expected documents, found only what a run of longscan has written{table}")
    return [_source(folder / name, name, below[name]) for name in parquet if name not in own]


def _of_runs(folder: Location, names: Iterable[str], asked: Collection[str] = ()) -> set[str]:
    """Those of `names`, in a folder, that runs of longscan have written, and says so. asked: tables that are meant to be read."""
    parts = {name: found for name in names if (found := _PART.fullmatch(name)) is not None and found["table"] not in asked}
    runs = {found["run"] or "" for found in parts.values()}
    marks = {run: folder / run / RUN if run else folder / RUN for run in runs}
    own = sorted(run for run in runs if exists(marks[run] / "fingerprint.json"))
    left_out = {name for name, found in parts.items() if (found["run"] or "") in own}
    if own:
        more = f" and {len(own) - 3} more" if len(own) > 3 else ""
        said = ", ".join(str(folder / run if run else folder) for run in own[:3]) + more
        log.info("no input, since runs of longscan wrote them: %s in %s", plural(len(left_out), "file"), said)
    return left_out


def _by_glob(place: Location, parts: list[str], wild: int) -> list[SourceFile]:
    """Files that a glob matches, and the Parquet files in the folders that it matches. `parts[wild]` is the first with a wildcard."""
    uri = place.uri.rstrip("/")
    tail = "/".join(parts[wild:])
    root = Location(place.fs, "/".join(parts[:wild]) or "/", uri[: len(uri) - len(tail)])
    asks_for_hidden = any(part.startswith(("_", ".")) for part in parts[wild:])
    found: dict[str, SourceFile] = {}
    for match, info in place.fs.glob(place.path, detail=True).items():
        name = match[len(root.path.rstrip("/")) + 1 :].rstrip("/")
        if not name or (_hidden(name) and not asks_for_hidden):
            continue
        if info["type"] == "directory":
            below = [(f"{name}/{inner}", info) for inner, info in _below(root / name) if not _hidden(inner)]
            found.update((inner, _source(root / inner, inner, info)) for inner, info in below if inner.lower().endswith(SUFFIXES))
        else:
            found[name] = _source(root / name, name, None if place.is_local else info)
    if not found:
        there = children(root)[:10]
        raise InputError(f"{place}: expected a glob that matches Parquet files, found in {root}: {', '.join(there) or 'nothing'}")
    own = _of_runs(root, found, parts[wild:])
    if len(own) == len(found):
        raise InputError(f"{place}: expected a glob that matches documents, found only what runs of longscan have written")
    return [found[name] for name in sorted(found) if name not in own]


def _below(folder: Location) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """All files below a folder: names relative to it, and what a remote listing tells of them. Links are followed, each folder once."""
    if not folder.is_local:
        base = len(folder.path.rstrip("/")) + 1
        found = folder.fs.find(folder.path, detail=True)
        yield from ((path[base:], info) for path, info in found.items() if not path.endswith("/"))
        return
    seen: set[str] = set()
    for above, folders, files in os.walk(folder.path, followlinks=True):
        real = os.path.realpath(above)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        inner = os.path.relpath(above, folder.path)
        yield from ((name if inner == "." else f"{inner}/{name}", None) for name in files)


def _source(place: Location, name: str, info: Mapping[str, Any] | None) -> SourceFile:
    shown = os.fsencode(name).decode("utf-8", "backslashreplace")  # a local name may hold bytes that are no UTF-8
    if info is not None:
        return SourceFile(place.uri, shown, info.get("size") or 0, file_version(info), ())
    try:
        size, version = current_version(place)
    except OSError as error:  # a link that leads nowhere, a folder that may not be searched
        return SourceFile(place.uri, shown, 0, "", (), error=f"cannot be opened: {redact(str(error))}")
    return SourceFile(place.uri, shown, size, version, ())


def _name(uri: str) -> str:
    path = uri.partition("?")[0] if is_uri(uri) else uri
    return path.rstrip("/").rpartition("/")[2]


def _hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def _census(names: Iterable[str]) -> str:
    """What a folder holds, by suffix: "3 .jsonl, 1 .csv"."""
    counts = Counter(os.path.splitext(name)[1] or "without a suffix" for name in names)
    commonest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:5]
    return ", ".join(f"{count} {suffix}" for suffix, count in commonest) or "no files at all"


def _missing(place: Location) -> InputError:
    """The error for a name that is not there: how far the path goes, and what is there instead."""
    gone, above = place, place.parent
    while not exists(above) and above.parent.path != above.path:
        gone, above = above, above.parent
    names = [name for name in children(above) if not name.startswith(".")] if exists(above) else []
    near = difflib.get_close_matches(gone.name, names, 3)
    hint = f"near it: {', '.join(near)}" if near else f"there: {', '.join(names[:10]) or 'nothing'}"
    return InputError(f"{place}: expected a file, a folder or a glob, found no {_name(gone.uri)!r} in {above}; {hint}")
