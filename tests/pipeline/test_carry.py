"""Carries: what a document takes along is all it needs, wherever it is cut; and their form on disk, whole or not at all."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collecting import SEGMENT, Collecting, going_on, printed, rows_of, task
from fake_model import document, stream
from hypothesis import given, settings
from hypothesis import strategies as st
from longscan.pipeline.engine.lanes import ENTRIES_AHEAD
from longscan.pipeline.keep.carry import Owner, carry_name, content_digest, named, parse_carry, save_carry
from longscan.pipeline.keep.frames import pack, read_frames
from longscan.pipeline.keep.journal import JournalWriter, read_journal
from longscan.pipeline.keep.rowcodec import FRAME_BYTES, NONE, Counts, Run, after_row, pack_runs
from longscan.pipeline.records import Carry, Cut, DocumentRow, ErrorRow, HostCarry, Outcome, TokenStream
from longscan.pipeline.storage.location import locate


def run(streams: Iterable[TokenStream], keeper: Collecting | None = None, **sizes: Any) -> dict[int, list[Outcome]]:
    return rows_of(streams, task(window_tokens=128), keeper, **sizes)


def tokens(ordinal: int, length: int, carry: Carry | None = None, block: int = 100) -> TokenStream:
    """A document's stream, from its carry on."""
    ids = np.random.default_rng(ordinal).integers(0, 11, length)
    whole = stream(ordinal, ids, block=block, offsets=True, num_bytes=3 * length)
    return going_on(whole, carry)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=5),
    checkpoint=st.sampled_from([64, 128, 256]),
    lanes=st.integers(1, 4),
    lanes_again=st.integers(1, 4),
    seed=st.integers(0, 1 << 20),
)
def test_a_document_goes_on_from_any_carry_as_if_nothing_had_been(
    lengths: list[int], checkpoint: int, lanes: int, lanes_again: int, seed: int
) -> None:
    keeper = Collecting(checkpoint)
    undisturbed = run((tokens(n, length) for n, length in enumerate(lengths)), keeper, lanes=lanes)
    due = {n for n, length in enumerate(lengths) if length > checkpoint - ENTRIES_AHEAD * SEGMENT}
    assert {carry.ordinal for carry in keeper.carries} <= due
    chosen: dict[int, Carry] = {}
    for carry in keeper.carries:
        assert carry.position % SEGMENT == 0
        assert 0 < carry.position < lengths[carry.ordinal]
        # Not drawn: which carries there are, and in what order, is the threads' doing.
        if random.Random(f"{seed} {carry.ordinal} {carry.position}").random() < 0.5:
            chosen[carry.ordinal] = carry
    again = run((tokens(n, length, chosen.get(n)) for n, length in enumerate(lengths)), lanes=lanes_again)
    for ordinal, rows in undisturbed.items():
        after = chosen[ordinal].position if ordinal in chosen else 0
        assert printed(again[ordinal]) == printed(rows, after), f"document {ordinal}, from token {after}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_host_and_the_device_part_are_of_the_same_position(device: str) -> None:
    """On a GPU results are a step behind, and copies are queued: every carry of a long document is followed to its end."""
    keeper, length = Collecting(64), 2000
    expected = run([tokens(0, length)], keeper, device=device)[0]
    assert len(keeper.carries) > 5
    for carry in keeper.carries:
        again = run([tokens(0, length, carry)], device=device)[0]
        assert printed(again) == printed(expected, carry.position), f"from token {carry.position}"


def test_without_room_a_carry_is_made_later() -> None:
    class Full(Collecting):
        asked = 0

        def reserve(self) -> bool:
            self.asked += 1
            return self.asked > 2

    keeper = Full(128 + (ENTRIES_AHEAD - 1) * SEGMENT)
    run([tokens(0, 1000)], keeper, step_tokens=64)
    assert [carry.position for carry in keeper.carries] == [256, 384, 512, 640, 768, 896]
    assert keeper.asked == 8, "not at 128 and not at 192"


@given(st.lists(st.binary(max_size=40), max_size=4), st.integers(0, 400))
def test_frames_are_read_as_far_as_they_are_whole(bodies: list[bytes], cut: int) -> None:
    frames = [pack({"n": n, "x": float("nan") if n else 0.1}, [body]) for n, body in enumerate(bodies)]
    data = b"".join(frames)
    kept = len(data[:cut]) if cut < len(data) else len(data)
    ends = np.cumsum([len(frame) for frame in frames]).tolist()
    whole = sum(end <= kept for end in ends)
    found = list(read_frames(io.BytesIO(data[:kept])))
    assert [bytes(frame.body) for frame in found] == bodies[:whole]
    assert [frame.header["n"] for frame in found] == list(range(whole))


@given(st.data())
def test_a_changed_bit_is_no_frame(data: st.DataObject) -> None:
    frame = bytearray(pack({"n": 1}, [b"some bytes"]))
    at = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[at // 8] ^= 1 << at % 8
    assert list(read_frames(io.BytesIO(bytes(frame)))) == []


OWNER = Owner("fingerprint", 2, 7, "digest")
TENSORS = {
    "model.tail": torch.randn(2, 3, 5).bfloat16(),
    "model.ssm": torch.randn(2, 4).T,
    "pool.mean": torch.randn(6, dtype=torch.float64),
}
LAYOUT = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}
CARRY = Carry(7, HostCarry(128, -1.25, -3.0, -0.1, 5, 1), Cut(300, 290, 100), lambda: TENSORS)


def test_a_carry_comes_back_as_it_was() -> None:
    parsed = parse_carry(save_carry(CARRY, OWNER, (1, 128, 0, 0)), OWNER, LAYOUT)
    assert not isinstance(parsed, str)
    saved, tensors = parsed
    assert (saved.owner, saved.host, saved.cut, saved.counts) == (OWNER, CARRY.host, CARRY.cut, (1, 128, 0, 0))
    assert all(torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    ("owner", "layout", "why"),
    [
        (replace(OWNER, fingerprint="another"), LAYOUT, "another run"),
        (replace(OWNER, shard=3), LAYOUT, "another document"),
        (replace(OWNER, ordinal=8), LAYOUT, "another document"),
        (replace(OWNER, digest="other"), LAYOUT, "content has changed"),
        (OWNER, {**LAYOUT, "pool.max": (torch.float32, (6,))}, "not those of this model"),
        (OWNER, {**LAYOUT, "model.ssm": (torch.float32, (2, 4))}, "not those of this model"),
    ],
)
def test_a_carry_is_for_one_document_of_one_run(owner: Owner, layout: Any, why: str) -> None:
    parsed = parse_carry(save_carry(CARRY, OWNER, (0, 0, 0)), owner, layout)
    assert isinstance(parsed, str)
    assert why in parsed


@pytest.mark.parametrize("header", [{}, {"owner": 3}, {"owner": {"fingerprint": 1}}, {"owner": {"x": 1}, "tensors": []}])
def test_a_whole_frame_that_is_no_carry_is_none(header: dict[str, Any]) -> None:
    assert isinstance(parse_carry(pack(header), OWNER, LAYOUT), str)
    assert isinstance(parse_carry(save_carry(CARRY, OWNER, NONE) + b"more", OWNER, LAYOUT), str)
    assert isinstance(parse_carry(None, OWNER, LAYOUT), str)


def test_names_and_digests() -> None:
    assert named(carry_name(7, 128, 3)) == (7, 128, 3)
    assert carry_name(7, 128, 9) < carry_name(7, 1 << 40, 3), "the newest position is the last name"
    assert [named(name) for name in ("000001-000001.rows", "x-y-z.carry", "1-2.carry", ".longscan-1-2-3.carry-ab")] == [None] * 4
    ids = replace(document(0, None), token_ids=np.array([1, 2], np.int32))
    several = [document(0, b"a"), document(0, b"b"), ids, replace(ids, token_ids=np.array([1, 2], np.int64))]
    several.append(replace(document(0, b"a"), positions=np.array([1])))
    assert len({content_digest(one) for one in several}) == len(several)


def some_rows(count: int) -> list[Outcome]:
    made = run([tokens(0, count)])[0]
    return [replace(row, document=document(0)) for row in made if not isinstance(row, ErrorRow)]


def frames_of(rows: Sequence[Outcome], before: Counts = NONE) -> tuple[bytes, Counts]:
    after: Counts | None = before
    for row in rows:
        after = after_row(after or NONE, row)
        assert after is not None
    (frame,) = pack_runs([Run(0, "d", before, after or NONE, rows)])
    return frame, after or NONE


def test_a_journal_gives_each_row_once_with_its_bits_whoever_wrote_it(tmp_path: Path) -> None:
    """Attempt 2 goes on before the end of attempt 1, and attempt 3 from there."""
    rows, folder, head = some_rows(700), locate(str(tmp_path)), {"fingerprint": "f", "shard": 0}
    counts, at = [NONE], NONE
    for row in rows:
        _, at = frames_of([row], at)
        counts.append(at)
    for attempt, (start, stop) in enumerate([(0, 9), (5, 12), (12, len(rows))], 1):
        writer = JournalWriter(folder, attempt, head)
        for i in range(start, stop, 2):
            part = rows[i : min(i + 2, stop)]
            writer.write([frames_of(part, counts[i])[0]])
        writer.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    journal = read_journal(folder, names, head)
    trail = journal.trails[0]
    assert trail.finished
    assert printed(journal.replay(trail, document(0))) == printed(rows)
    assert printed(journal.replay(trail, document(0), counts[7])) == printed(rows[:7])
    journal.close()
    gap = read_journal(folder, [names[0], names[2]], head).trails[0]
    assert (gap.finished, gap.counts) == (False, counts[9])
    assert read_journal(folder, names, {"fingerprint": "g", "shard": 0}).trails == {}


def test_documents_share_frames_as_long_as_these_are_small(tmp_path: Path) -> None:
    """Each document's rows come back with its own numbers, from whichever place of whichever frame, in any order."""
    folder, head, size = locate(str(tmp_path)), {"fingerprint": "f", "shard": 0}, FRAME_BYTES // 40
    made = [DocumentRow(document(n), n + 1, {"mean": np.full(size // 4, n, np.float32)}, log_likelihood=-n / 3) for n in range(100)]
    frames = pack_runs(Run(n, f"d{n}", NONE, NONE, [row]) for n, row in enumerate(made))
    assert 2 <= len(frames) <= 4
    assert all(len(frame) < FRAME_BYTES + 2 * size for frame in frames)
    assert pack_runs([]) == []
    writer = JournalWriter(folder, 1, head)
    writer.write(frames)
    writer.close()
    journal = read_journal(folder, [path.name for path in tmp_path.iterdir()], head)
    for n in (0, 1, 99, 50, 51, 0):
        assert journal.trails[n].finished
        assert journal.trails[n].digest == f"d{n}"
        assert printed(journal.replay(journal.trails[n], document(n))) == printed([made[n]])
    journal.close()
