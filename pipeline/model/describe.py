"""What a checkpoint is and what it takes to run it, in lines for a person."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from longscan.pipeline.errors import ModelError
from longscan.pipeline.model.config import Mamba2Geometry
from longscan.pipeline.model.formats import AUTO, FORMATS, find_format
from longscan.pipeline.model.recipe import read_recipe
from longscan.pipeline.model.weights import check_weights, weight_files
from longscan.pipeline.tokenize import check_fits, load_tokenizer
from longscan.pipeline.wording import count, num_bytes, plural

ITEMSIZES = {"bfloat16": 2, "float32": 4}
"""model.dtype on a GPU, on a CPU -> bytes of an activation."""


@dataclass(frozen=True, slots=True)
class Description:
    lines: tuple[str, ...]
    """What could be found out."""
    refusal: ModelError | None
    """Why longscan does not run it, if so."""


def describe(folder: str | Path, *, lanes: int, format: str = AUTO) -> Description:
    """Look at the checkpoint in `folder`, at its config and the headers of its files. Only what is no checkpoint at all raises.

    lanes: documents in flight that memory is told for.
    """
    folder, format = Path(folder), find_format(folder, format)
    lines = [f"format      {format}, by {FORMATS[format].CONFIG}"]
    try:
        geometry = FORMATS[format].read_geometry(folder)
        lines += _network(geometry)
        lines += _files(folder, geometry, format)
        lines += _use(folder, geometry)
    except ModelError as error:
        return Description(tuple(lines), error)
    return Description((*lines, *_memory(geometry, lanes)), None)


def _network(g: Mamba2Geometry) -> list[str]:
    head = "tied to the embedding" if g.tied else "of its own" if g.has_head else "none: it embeds and does not score"
    biases = [name for name, there in (("projections", g.use_bias), ("convolution", g.use_conv_bias)) if there]
    lines = [
        f"network     Mamba-2, {plural(g.num_layers, 'layer')} of width {g.d_model}, inner width {g.inner},"
        f" {count(g.num_parameters)} parameters ({g.num_parameters})",
        f"mixer       {plural(g.num_heads, 'head')} of {g.head_dim}, {plural(g.num_groups, 'group')}, state {g.state_size},"
        f" convolution over {g.conv_kernel}, time steps {g.dt_limit[0]:g} to {g.dt_limit[1]:g}, norm"
        f" {'before' if g.norm_before_gate else 'after'} the gate, eps {g.eps:g}, biases: {', '.join(biases) or 'none'}",
        f"vocabulary  {g.vocab_size} rows, head {head}",
    ]
    if g.max_trained_tokens is not None:
        lines.append(f"trained     on texts of up to {g.max_trained_tokens} tokens")
    return lines


def _files(folder: Path, geometry: Mamba2Geometry, format: str) -> list[str]:
    files = weight_files(folder, format=format)
    size = num_bytes(sum(file.stat().st_size for file in files))
    dtypes = Counter(tensor.dtype for tensor in check_weights(folder, geometry, format=format).values())
    said = ", ".join(f"{number} {dtype}" for dtype, number in dtypes.most_common())
    names = files[0].name if len(files) == 1 else f"{len(files)} files, {files[0].name} to {files[-1].name}"
    return [f"weights     {names}, {size}, tensors: {said}"]


def _use(folder: Path, geometry: Mamba2Geometry) -> list[str]:
    """What texts become tokens by, and how vectors are made where the folder says it. A tokenizer may also be another folder's."""
    try:
        tokenizer = load_tokenizer(str(folder))
        check_fits(tokenizer, geometry.vocab_size)
        added = [name for name, there in (("BOS", tokenizer.adds_bos), ("EOS", tokenizer.adds_eos)) if there]
        lines = [
            f"tokenizer   {tokenizer.vocab_size} entries, BOS {tokenizer.bos_id}, EOS {tokenizer.eos_id}, its template adds"
            f" {' and '.join(added) or 'neither'}"
        ]
    except ModelError as error:
        lines = [f"tokenizer   none that runs: {error}"]
    recipe = read_recipe(folder)
    if recipe is not None:
        prompts = ", ".join(f"{name}{' (the default)' * (name == recipe.default_prompt)}" for name in recipe.prompts)
        lines.append(
            f"embedding   {recipe.pooling}, {'normalized' if recipe.normalize else 'not normalized'}, prompts: {prompts or 'none'},"
            f" {'in' if recipe.include_prompt else 'not in'} the pooling"
        )
    return lines


def _memory(g: Mamba2Geometry, lanes: int) -> list[str]:
    lines = []
    for dtype, itemsize in ITEMSIZES.items():
        weights, state = g.num_parameters * itemsize, g.state_bytes(itemsize)
        lines.append(
            f"{dtype:<12}{num_bytes(weights)} of weights, {num_bytes(state)} ({state} bytes) of state a document of any length;"
            f" with {plural(lanes, 'lane')} {num_bytes(weights + (lanes + 1) * state)}, and what a step takes"
        )
    return lines
