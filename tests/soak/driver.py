"""The command, with a witness beside the engine of each worker."""

from __future__ import annotations

import sys
from functools import partial

import longscan.pipeline.run
from longscan.jobs.run import main
from witness import witnessed

if __name__ == "__main__":
    longscan.pipeline.run.run = partial(longscan.pipeline.run.run, build=witnessed)
    sys.exit(main())
