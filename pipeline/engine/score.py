"""Log-likelihoods: natural logarithms of the probability of each token given all before it, and what is made of them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from longscan.kernels.segments import TILE
from longscan.pipeline.config import TaskConfig
from longscan.pipeline.errors import ConfigError

Logprobs = npt.NDArray[np.float32]

UNSCORED = math.nan
"""In a row of tokens/ (where it is written as null): a token without a score."""


def context_token(task: TaskConfig, *, add_bos: bool, bos_id: int | None, eos_id: int | None) -> int | None:
    """The token that every document is given as context before its first, or None for none.

    add_bos asks for the BOS token, and so does a score of the first token (`first_token` auto), which is content with
    the EOS token where the tokenizer has no BOS. Context is in no count, pool or window.

    Raises ConfigError where the tokenizer lacks what is asked for.
    """
    if add_bos:
        if bos_id is None:
            raise ConfigError("model.add_bos: expected a tokenizer with a BOS token, found none; set model.add_bos=false")
        return bos_id
    if not (task.scores and task.score.first_token == "auto"):
        return None
    if bos_id is None and eos_id is None:
        raise ConfigError(
            "task.score.first_token=auto: expected a tokenizer with a BOS or EOS token as context of the first token, found "
            "neither; set task.score.first_token=skip to leave the first token unscored"
        )
    return eos_id if bos_id is None else bos_id


def scores_first_token(task: TaskConfig, context_id: int | None) -> bool:
    """Whether a document's first token has a score: it needs a context to come from."""
    return task.scores and task.score.first_token != "skip" and context_id is not None


def tile_sums(logprobs: Logprobs) -> list[float]:
    """Sums of `logprobs` over each tile of 64, in float64; the last tile may be short.

    The order of additions inside a tile is fixed (a tree of halves), so a tile's sum has the same bits however many
    tiles are summed at once. Documents are scored by adding tile after tile, in the order of their positions.
    """
    tiles = -(-len(logprobs) // TILE)
    sums = np.zeros((tiles, TILE), dtype=np.float64)
    sums.reshape(-1)[: len(logprobs)] = logprobs
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    totals: list[float] = sums[:, 0].tolist()
    return totals


def bits_per_byte(log_likelihood: float, num_scored_tokens: int, num_bytes: int | None) -> float | None:
    """Bits that the scored tokens take per UTF-8 byte of the text; None where nothing is scored or there are no bytes."""
    if not num_bytes or not num_scored_tokens:
        return None
    return -log_likelihood / math.log(2.0) / num_bytes
