"""The demo's corpus: Jane Austen's six novels, from the Debian package r-cran-janeaustenr into one Parquet file.

    python -m longscan.jobs.demo.corpus [--package FILE.deb] [--out FILE.parquet]

Without --package the package is fetched by `apt-get download`; `dpkg` unpacks it. The package keeps the novels as R's
lazy-load database: records one after the other, each a length (uint32, big-endian) and a zlib stream that holds a
character vector in R's XDR serialization (R Internals, "Serialization Formats"), one string a printed line.
"""

from __future__ import annotations

import argparse
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from longscan.pipeline.errors import InputError

PACKAGE = "r-cran-janeaustenr"
PARQUET = Path(__file__).with_name("austen.parquet")
EDITORS_NOTE = "A NOTE ON THE TEXT"
"""Heads the last paragraph of Northanger Abbey, a modern publisher's words: the novel ends before it."""


@dataclass(frozen=True, slots=True)
class Novel:
    title: str
    published: int
    """Year of the first edition's sale; the last two came out together in December 1817."""
    held_out: bool = False
    """Never seen by the tokenizer's and the model's training."""


NOVELS = (
    Novel("Sense and Sensibility", 1811),
    Novel("Pride and Prejudice", 1813),
    Novel("Mansfield Park", 1814),
    Novel("Emma", 1815),
    Novel("Northanger Abbey", 1817),
    Novel("Persuasion", 1817, held_out=True),
)

COLUMNS: dict[str, pa.DataType] = {
    "title": pa.string(),
    "author": pa.string(),
    "published": pa.int32(),
    "held_out": pa.bool_(),
    "text": pa.string(),
}


def fetch(folder: Path) -> Path:
    """Download the package into `folder`. Raises InputError where apt cannot."""
    done = subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, text=True, check=False)
    found = sorted(folder.glob(f"{PACKAGE}_*.deb"))
    if done.returncode or not found:
        raise InputError(
            f"expected `apt-get download {PACKAGE}` to fetch the package, found: {done.stderr.strip() or 'no file'}; "
            "run `apt-get update` first, or give --package a file downloaded elsewhere"
        )
    return found[-1]


def records(database: bytes) -> Iterator[bytes]:
    """The records of an R lazy-load database, decompressed."""
    while database:
        (size,) = struct.unpack_from(">I", database)
        stream = zlib.decompressobj()
        record = stream.decompress(database[4:])
        if len(record) != size:
            raise InputError(f"expected a record of {size} bytes, found {len(record)}; the package has another format than 1.0.0-1")
        yield record
        database = stream.unused_data


def lines(record: bytes) -> list[str]:
    """The strings of a character vector serialized by R in XDR, version 3."""
    magic, version, name_length = struct.unpack_from(">2si8xi", record)
    at = 18 + name_length
    kind, count = struct.unpack_from(">ii", record, at)
    if magic != b"X\n" or version != 3 or kind & 0xFF != 16:
        raise InputError(f"expected an XDR character vector (X, 3, 16), found ({magic!r}, {version}, {kind & 0xFF})")
    at += 8
    out = []
    for _ in range(count):
        (length,) = struct.unpack_from(">4xi", record, at)
        out.append(record[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    return out


def novels(database: bytes) -> dict[str, str]:
    """Title -> text with its line breaks, for every record of the database; the first line of a record is its title."""
    titles = {novel.title.upper(): novel.title for novel in NOVELS}
    texts = {}
    for record in records(database):
        printed = lines(record)
        if EDITORS_NOTE in printed:
            printed = printed[: printed.index(EDITORS_NOTE)]
        text = "\n".join(printed).strip() + "\n"
        heading = printed[0].upper()
        if heading not in titles:
            raise InputError(f"expected a record to begin with one of {sorted(titles)}, found {heading!r}")
        texts[titles[heading]] = text
    if len(texts) != len(NOVELS):
        raise InputError(f"expected {len(NOVELS)} novels, found {sorted(texts)}")
    return texts


def table(package: Path) -> pa.Table:
    """The corpus, in order of publication."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg", "-x", str(package), folder], check=True)
        database = next(Path(folder).rglob("janeaustenr/data/Rdata.rdb")).read_bytes()
    texts = novels(database)
    rows = [
        {
            "title": novel.title,
            "author": "Jane Austen",
            "published": novel.published,
            "held_out": novel.held_out,
            "text": texts[novel.title],
        }
        for novel in NOVELS
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(COLUMNS))


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the demo's corpus from the Debian package r-cran-janeaustenr.")
    parser.add_argument("--package", type=Path, help="the package, already downloaded")
    parser.add_argument("--out", type=Path, default=PARQUET)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        corpus = table(arguments.package or fetch(Path(folder)))
    # A row group a novel, so that several workers can share them; dictionaries would only copy the texts.
    pq.write_table(corpus, arguments.out, row_group_size=1, compression="zstd", compression_level=19, use_dictionary=False)
    print(f"{arguments.out}: {corpus.num_rows} novels, {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
