"""What will run, from what was asked for and what is there: also for machines that the tests do not run on."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_checkpoint
from longscan.kernels.segments import MOST_ROWS, TILE
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ConfigError, ModelError
from longscan.pipeline.keep.leftover import Done
from longscan.pipeline.model import Mamba2Geometry, read_geometry
from longscan.pipeline.plan.dryrun import Speeds, _peak_bytes, estimate, measure_speed
from longscan.pipeline.plan.nodes import Workers
from longscan.pipeline.plan.planner import make_plan
from longscan.pipeline.plan.resolve import (
    Choice,
    Device,
    _cpu_name,
    choose,
    look_at_device,
    model_facts,
    narrower_products,
    tokenizer_of,
)
from longscan.pipeline.plan.sizes import MAX_LANES, choose_sizes, choose_spans
from longscan.pipeline.plan.tail import Giants
from longscan.pipeline.read.sample import Sample
from longscan.pipeline.shards import RowGroup, ShardReport, SourceFile

GB = 1 << 30
CPU = Device("cpu", "x86_64", 16 * GB)
H200 = Device("cuda", "NVIDIA H200", 140 * GB, (9, 0), has_tile=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def geometry(folder: Path) -> Mamba2Geometry:
    return read_geometry(folder)


def job(folder: Path, **keys: Any) -> JobConfig:
    config = JobConfig()
    config.model.path = str(folder)
    for key, value in keys.items():
        section, _, field = key.partition("__")
        setattr(getattr(config, section), field, value)
    return config


def chosen(folder: Path, device: Device, **keys: Any) -> Choice:
    config, geometry = job(folder, **keys), read_geometry(folder)
    return choose(config, str(folder), geometry, tokenizer_of(config, geometry, str(folder)), device)


def test_automatic_choices(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "longscan"):
        here = chosen(folder, CPU)
        there = chosen(folder, H200)
    assert (here.device, here.backend, here.dtype) == ("cpu", "torch", "float32")
    assert (there.device, there.backend, there.dtype) == ("cuda", "cutile", "bfloat16")
    assert caplog.messages == [
        "backend torch (there is no CUDA GPU that torch can use), float32 on cpu: x86_64",
        "backend cutile (NVIDIA H200 runs it), bfloat16 on cuda: NVIDIA H200",
    ]


@pytest.fixture
def tf32() -> Iterator[None]:
    """As TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 has it."""
    assert torch.get_float32_matmul_precision() == "highest", "nobody has asked for less"
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("tf32")
def test_tf32_is_for_those_who_ask_pytorch_for_it_and_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "longscan"):
        for device, dtype in ((H200, "float32"), (H200, "bfloat16"), (CPU, "float32")):
            chosen(folder, device, model__dtype=dtype)
    assert [message.endswith(", products in TF32") for message in caplog.messages] == [True, False, False]
    assert narrower_products("torch", "cuda") == "TF32"


def test_fp32_is_multiplied_in_fp32(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "longscan"):
        assert chosen(folder, H200, model__dtype="float32").backend == "torch"
    assert caplog.messages[0].endswith("float32 on cuda: NVIDIA H200")
    assert narrower_products("torch", "cuda") is None


@pytest.mark.parametrize(
    ("device", "keys", "reason"),
    [
        (CPU, {}, "no CUDA GPU"),
        (replace(H200, capability=(7, 5)), {}, "compute capability 7.5"),
        (replace(H200, has_tile=False), {}, "cuda-tile is not installed"),
        (H200, {"model__dtype": "float32"}, "model.dtype is float32"),
    ],
)
def test_where_the_kernels_cannot_run(folder: Path, device: Device, keys: dict[str, Any], reason: str) -> None:
    assert chosen(folder, device, **keys).backend == "torch"
    with pytest.raises(ConfigError) as caught:
        chosen(folder, device, engine__backend="cutile", **keys)
    assert reason in str(caught.value)
    assert "engine.backend=auto" in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"head_dim": 16}, "a head_dim of 32, 64, 128, and the model's is 16"),
        ({"head_dim": 80, "d_model": 320}, "a head_dim of 32, 64, 128, and the model's is 80"),
        ({"state_size": 24}, "a state_size of 16, 64, 128, 256, and the model's is 24"),
        ({"d_model": 96}, "widths that are multiples of 64, and the model's is 96"),
    ],
)
def test_models_that_the_kernels_do_not_take(tmp_path: Path, sizes: dict[str, int], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """They run on PyTorch, and the log says why."""
    folder = tiny_checkpoint(tmp_path, tokenizer=True, **sizes)
    with caplog.at_level(logging.INFO, "longscan"):
        assert chosen(folder, H200).backend == "torch"
    assert caplog.messages == [f"backend torch (the kernels take {reason}), bfloat16 on cuda: NVIDIA H200"]
    with pytest.raises(ConfigError, match=reason):
        chosen(folder, H200, engine__backend="cutile")


def test_the_context_token(folder: Path) -> None:
    assert chosen(folder, CPU).context_id is None
    assert chosen(folder, CPU, task__name="score").context_id == 0
    assert chosen(folder, CPU, model__add_bos=True).context_id == 0


def test_what_cannot_be_had_is_told(folder: Path, tmp_path: Path) -> None:
    config = job(folder)
    config.task.embedding.truncate_dim = 65
    with pytest.raises(ConfigError, match="truncate_dim"):
        choose(config, str(folder), read_geometry(folder), None, CPU)
    headless = tiny_checkpoint(tmp_path, tokenizer=True, base_model=True, tied=False)
    with pytest.raises(ModelError, match="output projection"):
        chosen(headless, CPU, task__name="score")


def test_a_tokenizer_is_not_needed_for_token_ids(folder: Path, geometry: Mamba2Geometry) -> None:
    assert tokenizer_of(job(folder, input__tokens_column="ids"), geometry, str(folder)) is None
    assert tokenizer_of(job(folder), geometry, str(folder)) is not None


@pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.kind)
def test_automatic_sizes(folder: Path, geometry: Mamba2Geometry, device: Device) -> None:
    sizes = choose_sizes(job(folder), geometry, device, 10**9, 8)
    assert sizes.step_tokens % TILE == 0
    assert sizes.step_tokens >= 8192
    assert 1 <= sizes.lanes <= MAX_LANES
    assert sizes.shard_tokens == 10**9 // (16 * 8)
    large = replace(geometry, num_layers=64, d_model=4096, num_heads=128, head_dim=64, state_size=128)
    lanes = choose_sizes(job(folder), large, device, 10**9, 8).lanes
    assert 1 <= lanes <= MAX_LANES
    assert lanes * large.state_bytes(4) < device.num_bytes / 2


@pytest.mark.parametrize(
    ("device", "workers", "shard"),
    [(CPU, 2, 1 << 18), (CPU, 4, 1 << 17), (CPU, 100, 1 << 17), (CPU, 1, 1 << 20), (H200, 4, 1 << 20), (H200, 1, 1 << 21)],
)
def test_a_small_input_is_shared_by_workers_that_take_long_for_it(
    folder: Path, geometry: Mamba2Geometry, device: Device, workers: int, shard: int
) -> None:
    """Eight million tokens: a worker has four shards in hand, so that eight of them would be for two workers alone."""
    assert choose_sizes(job(folder), geometry, device, 1 << 23, workers).shard_tokens == shard


def test_steps_fill_the_gpu_with_whole_segments(folder: Path, geometry: Mamba2Geometry) -> None:
    gpu = replace(H200, processors=132)
    steps = {
        heads: choose_sizes(job(folder), replace(geometry, num_heads=heads), gpu, 10**9, 8).step_tokens // 8192 for heads in (24, 32, 128)
    }
    # Two heads a block: 11 x 12 = 132 blocks, 8 x 16 = 128, 8 x 64 = 512 of 528.
    assert steps == {24: 11, 32: 8, 128: 8}


@pytest.mark.parametrize("gigabytes", [16, 24, 40, 80, 140])
def test_steps_fit_beside_the_weights(folder: Path, geometry: Mamba2Geometry, gigabytes: int) -> None:
    """A GPU of 24 GB holds codestral-7b's 14.6 GB of weights and no step of 65,536 tokens beside them."""
    large = replace(geometry, d_model=4096, num_layers=64, num_heads=128, head_dim=64, num_groups=8, state_size=128, vocab_size=32768)
    gpu = replace(H200, num_bytes=gigabytes * GB, processors=80)
    sizes = choose_sizes(job(folder), large, gpu, 10**9, 8, itemsize=2)
    weights = large.num_parameters * 2
    assert weights > 14 * GB * 0.9
    fits = weights + large.step_bytes(sizes.step_tokens, 2) + sizes.lanes * large.state_bytes(2) < gpu.num_bytes
    assert fits or (gigabytes == 16 and sizes.step_tokens == 8192)
    assert sizes.step_tokens >= 1 << 16 or gigabytes < 40
    assert sizes.step_tokens % 8192 == 0
    asked = choose_sizes(job(folder, engine__step_tokens=1 << 16), large, gpu, 10**9, 8)
    assert asked.step_tokens == 1 << 16


def test_spans_are_for_few_documents_and_for_those_who_ask(folder: Path, geometry: Mamba2Geometry) -> None:
    gpu = replace(H200, processors=132)
    narrow, wide = replace(geometry, num_heads=24), replace(geometry, num_heads=80)
    on_cutile = Choice(str(folder), "cuda", "cutile", "bfloat16", None, geometry.vocab_size)
    on_torch = replace(on_cutile, backend="torch")

    def spans(shape: Mamba2Geometry, documents: int, choice: Choice = on_cutile, **keys: Any) -> int | None:
        return choose_spans(job(folder, **keys), shape, choice, gpu, documents)

    assert [spans(narrow, n) for n in (1, 5, 6)] == [32, 32, None]
    assert [spans(wide, n) for n in (1, 2)] == [64, None]
    assert [spans(replace(geometry, num_heads=128, num_groups=8), n) for n in (1, 2)] == [64, None]
    # A few that will be left when all others are done count as few documents do.
    few = {share: Giants(2, share) for share in (0.1, 0.2)}
    assert [choose_spans(job(folder), narrow, on_cutile, gpu, 100, None, few[share]) for share in few] == [None, 32]
    assert choose_spans(job(folder), wide, on_cutile, gpu, 100, None, Giants(1, 0.2)) == 64
    assert choose_spans(job(folder), wide, on_cutile, gpu, 100, None, few[0.2]) is None, "two fill the GPU"
    assert choose_spans(job(folder, engine__spans=False), narrow, on_cutile, gpu, 100, None, few[0.2]) is None
    assert choose_spans(job(folder), narrow, on_cutile, gpu, 100, {"engine": {"span_tiles": None}}, few[0.2]) is None
    assert spans(narrow, 100, engine__spans=True) == 32
    assert spans(narrow, 1, engine__spans=False) is None
    # An entry may end wherever a segment does, and no span may be cut in two: it would have other bits.
    for tiles, narrow_span, wide_span in ((16, 16, 16), (96, 32, 48), (128, 32, 64), (5, 5, 5), (33, 11, 33), (67, 1, 1)):
        asked = {"engine__segment_tokens": tiles * TILE}
        assert [spans(shape, 1, engine__spans=True, **asked) for shape in (narrow, wide)] == [narrow_span, wide_span]
        assert spans(narrow, 1, **asked) == (narrow_span if narrow_span >= 16 else None)
        assert spans(wide, 1, **asked) == (wide_span if wide_span >= 32 else None)
    assert spans(narrow, 1, on_torch, engine__spans=True) is None
    # A run that goes on has the form that it began with, on whatever it goes on.
    began = [{"engine": {"span_tiles": tiles}} for tiles in (32, None)]
    config = job(folder)
    for documents in (1, 100):
        assert [choose_spans(config, narrow, on_cutile, gpu, documents, before) for before in began] == [32, None]
    assert choose_spans(job(folder, engine__spans=False), narrow, on_cutile, gpu, 1, began[0]) is None


def test_a_prompt_takes_slots_of_the_states(folder: Path, geometry: Mamba2Geometry) -> None:
    tight = replace(CPU, num_bytes=4 * 100 * geometry.state_bytes(4))
    config = job(folder)
    config.task.embedding.prompt_text = "x" * 40
    tokenizer = tokenizer_of(config, geometry, str(folder))
    plain, prompted = (choose(asked, str(folder), geometry, tokenizer, CPU) for asked in (job(folder), config))
    assert plain.context_slots == 1
    assert prompted.prompt is not None
    assert prompted.context_slots == 1 + prompted.prompt.replaceable > 2
    spare = 1  # of the one segment that a step has room for
    for choice in (plain, prompted):
        assert choose_sizes(job(folder), geometry, tight, 1, 1, choice.context_slots).lanes == 100 - choice.context_slots - spare


@pytest.mark.parametrize(("key", "value"), [("engine__step_tokens", 1 << 18), ("engine__lanes", 4096)])
def test_sizes_whose_places_the_kernels_cannot_count(folder: Path, geometry: Mamba2Geometry, key: str, value: int) -> None:
    codestral = replace(geometry, d_model=4096, num_heads=128, head_dim=64, num_groups=8, state_size=128)
    with pytest.raises(ConfigError, match=rf"{key.replace('__', '.')}: expected at most \d+ on a GPU with this model, got {value}"):
        choose_sizes(job(folder, **{key: value}), codestral, H200, 10**9, 8)
    choose_sizes(job(folder, **{key: value}), codestral, CPU, 10**9, 8)


def test_steps_of_more_rows_than_a_launch_has_blocks_for(folder: Path, geometry: Mamba2Geometry) -> None:
    """However narrow the model is."""
    asked = {"engine__step_tokens": MOST_ROWS // TILE * TILE + TILE}
    with pytest.raises(ConfigError, match=rf"engine.step_tokens: expected at most {MOST_ROWS // TILE * TILE} on a GPU with this model"):
        choose_sizes(job(folder, **asked), geometry, H200, 10**9, 8)
    most = MOST_ROWS // TILE * TILE
    assert choose_sizes(job(folder, engine__step_tokens=most), geometry, H200, 10**9, 8).step_tokens == most


def test_sizes_as_asked(folder: Path, geometry: Mamba2Geometry) -> None:
    config = job(folder, engine__lanes=3, engine__step_tokens=8256, engine__segment_tokens=64, output__shard_tokens=77)
    sizes = choose_sizes(config, geometry, CPU, 1, 1)
    assert (sizes.lanes, sizes.step_tokens, sizes.shard_tokens) == (3, 8256, 77)
    assert choose_sizes(job(folder, engine__segment_tokens=1 << 17), geometry, CPU, 1, 1).step_tokens == 1 << 17


def test_this_machine() -> None:
    device = look_at_device(use_gpu=False)
    assert device.kind == "cpu"
    assert device.num_bytes > GB / 2
    assert device.capability is None


@pytest.mark.parametrize(
    ("about", "name"),
    [("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz \nflags\t: x\nmodel name\t: Else\n", "Some CPU @ 2 GHz"), ("", platform.machine())],
)
def test_the_name_of_a_cpu(about: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(about)
    assert _cpu_name(str(tmp_path / "cpuinfo")) == f"{name}, {torch.backends.cpu.get_cpu_capability()}"
    assert _cpu_name(str(tmp_path / "gone")).startswith(platform.machine())


def test_facts_say_the_content_and_never_the_place(folder: Path, geometry: Mamba2Geometry) -> None:
    facts = model_facts(job(folder), chosen(folder, CPU), tokenizer_of(job(folder), geometry, str(folder)))
    assert set(facts) == {"content", "commit", "tokenizer", "context_id", "prompt_ids", "heads"}
    assert set(facts["tokenizer"]) == {"content", "commit", "parse_special", "bos_id", "eos_id"}
    assert str(folder) not in str(facts)


def test_an_estimate_adds_up(folder: Path, geometry: Mamba2Geometry) -> None:
    files = [SourceFile("/x", "x", 1, "v", (RowGroup(10, 40_000_000), RowGroup(5, 40_000_000)))]
    plan = make_plan(files, shard_tokens=1 << 22)
    choice = chosen(folder, CPU)
    sizes = choose_sizes(job(folder), geometry, CPU, plan.estimated_tokens, 4)
    speeds, sample = Speeds(1000.0, 500.0, 300_000_000), Sample(longest=8_000_000, rows=7, beyond=30_000_000, bytes_per_token=None)
    found = estimate(geometry, choice, sizes, plan, Workers(4, 4, 2, 0), speeds, sample, Done(), segment_tokens=8192)
    assert (found.rows, found.tokens, found.workers) == (15, 20_000_000, 2)
    assert found.weights_bytes == 4 * geometry.num_parameters
    said = str(found)
    assert "15 rows" in said
    # Both workers have ten million tokens.
    assert "2:46:40 with 2 workers once at work, at 1.0 k tokens/s each" in said
    assert "longest     about 2.0 M tokens, 1:06:40 alone, of 7 rows that were looked at; another may have up to 7.5 M" in said
    assert "0:00 with workers idle, which costs 0:00" in said
    assert "the program itself 300.0 MB" in said
    assert "done" not in said


def test_an_estimate_is_of_what_is_left(folder: Path, geometry: Mamba2Geometry) -> None:
    files = [SourceFile("/x", "x", 1, "v", (RowGroup(4, 16_000_000),) * 3)]
    plan = make_plan(files, shard_tokens=1 << 22)
    assert [shard.estimated_tokens for shard in plan.shards] == [4_000_000] * 3
    choice, sample = chosen(folder, CPU), Sample(longest=8_000_000, rows=12, beyond=0, bytes_per_token=2.0)
    sizes = choose_sizes(job(folder), geometry, CPU, plan.estimated_tokens, 1)
    made = (geometry, choice, sizes, plan, Workers(1, 1, 2, 0), Speeds(1e6, 1e6, 0), sample)
    reports = {0: ShardReport(0, 4, 0, 7_500_000, 0, 9.0)}
    whole, left = (estimate(*made, done, segment_tokens=64) for done in (Done(), Done(reports, {2: 6_000_000}, [3_000_000, 4_000_000])))
    assert (whole.tokens, whole.left_tokens, left.tokens, left.left_tokens) == (24_000_000, 24_000_000, 24_000_000, 10_000_000)
    assert left.tail.whole_seconds == pytest.approx(10, abs=0.1)
    said = str(left)
    assert "done        1 of 3 shards, 7.5 M tokens, and 6.0 M tokens of shards that are under way; about 10.0 M are left" in said
    assert "continued   up to 7.0 M tokens of 2 documents lie before states of input.state_path" in said
    assert "it may be down to 0:03" in said
    all_done = estimate(*made, Done(dict.fromkeys(range(3), reports[0])), segment_tokens=64)
    assert (all_done.left_tokens, all_done.tail.whole_seconds) == (0, 0.0), "but for its mark"


def test_the_peak_of_what_is_done_is_measured(tmp_path: Path) -> None:
    found, reused = _peak_bytes(lambda: torch.ones(1 << 24).sum()), 1 << 20  # of pages that the process has already
    assert found == 0 or (1 << 26) - reused <= found < 1 << 27
    assert _peak_bytes(lambda: None, str(tmp_path)) == 0


def test_speed_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longscan.pipeline.plan.dryrun.PROBE_S", 0.05)
    assert measure_speed(str(folder), None, chosen(folder, CPU), 128, 64, 1, scores=True) > 10
