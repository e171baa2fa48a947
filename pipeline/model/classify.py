"""Linear heads on hidden states: logits and labels of documents, or of chosen places in them, such as the ends of sentences.

A file of heads is a safetensors file:

    weight [labels, D], bias [labels]                  one head; the bias may be absent
    <head>.weight [labels, D], <head>.bias [labels]    several, by name
    metadata "labels": JSON, a list of names, or {"<head>": [...]}, where labels have names

A head of one output is a regression, or the logit of a binary question: it gives no label.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from longscan.pipeline.errors import ModelError
from longscan.pipeline.schemas import HeadShape
from safetensors import safe_open

HEAD_FILE = "classifier.safetensors"
"""In a model's folder."""
ROWS_AT_ONCE = 256

Logits = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Head:
    shape: HeadShape
    weight_LD: npt.NDArray[np.float64]
    bias_L: npt.NDArray[np.float64]

    def logits(self, hidden_RD: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[R, labels] of hidden states [R, D]. Summed in float64, a row by itself: its bits know no other row."""
        parts = [
            (hidden_RD[start : start + ROWS_AT_ONCE, None, :].astype(np.float64) * self.weight_LD).sum(axis=-1) + self.bias_L
            for start in range(0, len(hidden_RD), ROWS_AT_ONCE)
        ]
        return np.concatenate(parts).astype(np.float32) if parts else np.empty((0, self.shape.size), np.float32)


def head_file(asked: str | None, folder: str | Path) -> Path:
    """Where the heads are: the file that is named, or the one in the model's folder."""
    return Path(asked) if asked is not None else Path(folder) / HEAD_FILE


def head_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def apply(heads: Sequence[Head], hidden_RD: npt.NDArray[np.float32]) -> Logits:
    """By head, [R, labels]."""
    return {head.shape.name: head.logits(hidden_RD) for head in heads}


def read_heads(file: Path, width: int) -> tuple[Head, ...]:
    """Every head in the file, by name. Raises ModelError, one that lists all that is wrong."""
    try:
        with safe_open(file, framework="pt") as stored:
            tensors: dict[str, torch.Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no mapping
            metadata: Mapping[str, str] = stored.metadata() or {}
    except Exception as error:  # the library has errors of its own beside OSError
        raise ModelError(
            f"task.classify.head: expected a safetensors file of linear heads at {file}, but it cannot be read: {error}"
        ) from error
    problems: list[str] = []
    labels = _labels(metadata, problems)
    names = sorted(name.removesuffix("weight").removesuffix(".") for name in tensors if name == "weight" or name.endswith(".weight"))
    known = {f"{name}.{part}".removeprefix(".") for name in names for part in ("weight", "bias")}
    problems += [f"unexpected: {name} {list(tensor.shape)}" for name, tensor in tensors.items() if name not in known]
    problems += [f"labels: there is no head {name!r}" for name in labels if name not in names]
    heads = [_head(name, tensors, labels.get(name), width, problems) for name in names]
    if not names:
        problems.append("missing: weight, or <head>.weight")
    if problems:
        raise ModelError(f"{file}: expected heads as weight [labels, {width}] and bias [labels], found\n  " + "\n  ".join(problems))
    return tuple(head for head in heads if head is not None)


def _labels(metadata: Mapping[str, str], problems: list[str]) -> dict[str, list[str]]:
    try:
        found: Any = json.loads(metadata.get("labels", "{}"))
    except ValueError:
        found = None
    found = {"": found} if isinstance(found, list) else found
    if not isinstance(found, dict) or not all(isinstance(row, list) and all(isinstance(one, str) for one in row) for row in found.values()):
        problems.append(f"labels: expected a list of names, or lists by head, found {metadata.get('labels')!r}")
        return {}
    return found


def _head(name: str, tensors: Mapping[str, torch.Tensor], labels: list[str] | None, width: int, problems: list[str]) -> Head | None:
    prefix = f"{name}." if name else ""
    weight, bias = tensors[prefix + "weight"], tensors.get(prefix + "bias")
    before = len(problems)
    for part, tensor, shape in (
        ("weight", weight, (len(weight) if weight.ndim else 0, width)),
        ("bias", bias, (len(weight),) if weight.ndim else ()),
    ):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            problems.append(f"dtype: {prefix}{part} is {tensor.dtype}")
        elif tuple(tensor.shape) != shape or not len(weight):
            problems.append(f"shape: {prefix}{part} is {list(tensor.shape)}, expected {list(shape)}, of at least one label")
        elif not bool(tensor.isfinite().all()):
            problems.append(f"{prefix}{part} holds NaN or infinity")
    if labels is not None and weight.ndim and len(labels) != len(weight):
        problems.append(f"labels: {name or 'the head'} has {len(weight)} outputs and {len(labels)} names")
    if len(problems) > before:
        return None
    weight_LD = weight.double().numpy()
    bias_L = np.zeros(len(weight_LD)) if bias is None else bias.double().numpy()
    return Head(HeadShape(name, len(weight_LD), tuple(labels) if labels is not None else None), weight_LD, bias_L)
