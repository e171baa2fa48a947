"""What is settled before a run comes to where it is decided: the corpus' giants, and what a weight takes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import tiny_checkpoint
from longscan.jobs.compose import compose_job
from longscan.kernels.segments import TILE
from longscan.pipeline import prepare
from longscan.pipeline.model import Mamba2Geometry, read_geometry
from longscan.pipeline.plan.resolve import Device
from longscan.pipeline.plan.sizes import STEP_SHARE, _blocks

SHORT = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture
def geometry(model: Path) -> Mamba2Geometry:
    return read_geometry(model)


def prepared(gpu: Device, model: Path, source: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> prepare.Prepared:
    monkeypatch.setattr(prepare, "look_at_device", lambda _: gpu)
    paths = (f"model.path={model}", f"input.path={source}", f"output.path={source.parent / 'out'}")
    return prepare.prepare(compose_job(["task=embed", "cluster=inprocess", *paths, *more]))


@pytest.mark.parametrize(("giant", "spans"), [(1, None), (1000, 32)])
def test_a_giant_in_a_row_group_of_its_own_is_scanned_in_spans(
    giant: int, spans: int | None, model: Path, geometry: Mamba2Geometry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.parquet"
    with pq.ParquetWriter(source, pa.schema({"text": pa.string()})) as writer:
        for rows in ([f"{n} and so on" for n in range(SHORT)], [" ".join(map(str, range(giant)))]):
            writer.write_table(pa.table({"text": rows}))
    gpu = Device("cuda", "a GPU", 1 << 34, (9, 0), has_tile=True, processors=10 * _blocks(geometry))
    segments = (f"engine.segment_tokens={32 * TILE}", f"engine.step_tokens={64 * TILE}")
    assert prepared(gpu, model, source, monkeypatch, *segments).choice.span_tiles == spans


def test_steps_fit_beside_weights_of_the_type_that_is_asked_for(
    model: Path, geometry: Mamba2Geometry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["a text"]}), source)
    room = 12 * geometry.step_bytes(8192, 4) + 4 * geometry.num_parameters
    gpu = Device("cuda", "a GPU", round(room / STEP_SHARE), (9, 0))
    sizes = {dtype: prepared(gpu, model, source, monkeypatch, f"model.dtype={dtype}").sizes for dtype in ("bfloat16", "float32")}
    assert sizes["bfloat16"].step_tokens == 8 * 8192
    assert sizes["float32"].step_tokens == 6 * 8192, "half of the twelve that fit"
