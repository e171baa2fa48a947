"""Steps that wait until the carries of the steps before are kept: what a stop finds does not hang on how fast a disk is.

In another process: `import leisure; leisure.take()`.
"""

from __future__ import annotations

from longscan.pipeline.engine.forward import Forward
from longscan.pipeline.engine.results import Launched
from longscan.pipeline.engine.steps import Step
from longscan.pipeline.keep.shardkeeper import ShardKeeper
from waiting import until

_launch = Forward.launch


def launch(forward: Forward, step: Step) -> Launched:
    """Instead of `Forward.launch`, of an engine whose callers keep their documents."""
    due: dict[ShardKeeper, int] = {}
    for entry in step.entries:
        keeper = entry.document.caller.keeper
        if not isinstance(keeper, ShardKeeper):  # nobody's tokens, to try the engine
            continue
        due[keeper] = due.get(keeper, 0) + bool(entry.at_risk)
    for keeper, of_this_step in due.items():
        until(lambda keeper=keeper, most=of_this_step: keeper._under_way <= most)  # type: ignore[misc]
    return _launch(forward, step)


def take() -> None:
    """Do so in this process from now on."""
    Forward.launch = launch  # type: ignore[method-assign]
