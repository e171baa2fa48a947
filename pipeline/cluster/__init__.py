"""Workers on Ray: an elastic pool of actors, on this machine or on a cluster. The one folder that knows Ray.

Only descriptions of shards and reports pass through Ray; a worker reads its own input and writes its own output. Ray Data
is the scheduler: it keeps the pool between its bounds, holds back, and tries again what a lost worker had in hand.

A cluster's nodes find longscan, the model, the input and the output by the same names as this process: longscan must be installed
there (in their image, or as a wheel by `py_modules` of the Ray job), and local paths must lie on a disk that all share.
"""

from longscan.pipeline.cluster.connection import joined
from longscan.pipeline.cluster.placement import nodes_of, on_a_worker
from longscan.pipeline.cluster.pool import run_chains

__all__ = ["joined", "nodes_of", "on_a_worker", "run_chains"]
