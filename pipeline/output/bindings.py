"""What is said of kept states before a run starts: whether it can keep any, and whether it can go on from an earlier run's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from longscan.pipeline.commit.ledger import RUN
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ConfigError, OutputError
from longscan.pipeline.keep.states import STATES, missing_parts
from longscan.pipeline.model import Mamba2Geometry
from longscan.pipeline.output.folder import SUCCESS
from longscan.pipeline.plan.fingerprint import Facts, explain_difference, state_facts
from longscan.pipeline.read.find import spot
from longscan.pipeline.storage.location import exists, locate, read_bytes
from longscan.pipeline.storage.redaction import redact
from longscan.pipeline.tokenize import TextTokenizer

MOST_STATE_BYTES = 2_000_000_000


def earlier_run(config: JobConfig) -> Facts | None:
    """The facts of the run at `input.state_path`, or None where none is named.

    Raises ConfigError where there is no finished run that kept states.
    """
    path = config.input.state_path
    if path is None:
        return None
    place = locate(path, ConfigError)
    expected = f"input.state_path: expected the output of a finished run with output.keep_state=true, found {place}"
    output = locate(config.output.path, OutputError)
    if spot(place) == spot(output):
        raise ConfigError(f"{expected}, which is output.path: a run that goes on from another's states writes to a folder of its own")
    try:
        data = read_bytes(place / RUN / "fingerprint.json")
        finished = exists(place / SUCCESS)
        facts: Facts | None = None if data is None else dict(json.loads(data)["facts"])
        gone = missing_parts(place / STATES)
        begun = not config.output.overwrite and exists(output / RUN / "fingerprint.json")
    except Exception as error:  # each file system has exceptions of its own
        raise ConfigError(f"{expected}, which cannot be read: {redact(str(error))}") from error
    if facts is None:
        raise ConfigError(f"{expected}, which is no run of longscan")
    if not finished:
        raise ConfigError(f"{expected}, which is not finished: run its command again until it is")
    if not facts.get("output", {}).get("keep_state"):
        raise ConfigError(f"{expected}, which was made without it")
    try:
        state_facts(facts)
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{expected}, made by another version of longscan, as this one does not know its settings: {error!r}") from error
    if gone and not begun:
        raise ConfigError(
            f"{expected}, whose states are gone: {gone}. Leave input.state_path out to compute every document from its beginning"
        )
    return facts


def check_bound(earlier: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise ConfigError, and say what differs, where a run of these facts cannot go on from an earlier one's states."""
    changes = explain_difference(state_facts(earlier), state_facts(facts))
    if changes:
        lines = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(
            "input.state_path: expected a run whose states this one can go on from. What changed from that run to this one:\n"
            f"{lines}\nSet these keys as they were, or leave input.state_path out to compute every document from its beginning"
        )


def check_keeps(tokenizer: TextTokenizer | None, geometry: Mamba2Geometry) -> None:
    """Raise ConfigError where no state could be kept. tokenizer: None where documents bring token ids."""
    if tokenizer is not None and tokenizer.cuts.reason is not None:
        raise ConfigError(
            "output.keep_state: expected a tokenizer whose texts can be shown to be safe to cut somewhere, so that a longer text has "
            f"the same tokens up to there; found one of which that cannot be said, because {tokenizer.cuts.reason}. "
            "Set output.keep_state=false, or give token ids in input.tokens_column"
        )
    if geometry.state_bytes(4) > MOST_STATE_BYTES:
        raise ConfigError(
            f"output.keep_state: expected a model whose state is at most {MOST_STATE_BYTES} bytes, which a value of a Parquet file can "
            f"hold, found one of {geometry.state_bytes(4)}; set output.keep_state=false"
        )
