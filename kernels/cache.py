"""Where compiled kernels are kept from one process to the next: CUDA Tile's own cache, in a folder that can be written.

CUDA Tile 1.7 keeps them, by compiler, architecture and code and up to 2 GB, in `cutile-python` under $XDG_CACHE_HOME or ~/.cache,
unless CUDA_TILE_CACHE_DIR names a folder or says `off`. Where that folder cannot be written every compilation ends in an error,
and in containers a home is often read-only or not there: so the folder is made sure of before CUDA Tile is first imported.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

VARIABLE = "CUDA_TILE_CACHE_DIR"
OFF = ("0", "off", "none", "")
NAME = "cutile-python"


def use_cache() -> str:
    """Settle the folder for this process and the ones it starts, and return it; `off` where no folder can be written.

    To be called before `cuda.tile` is first imported, which reads it then.
    """
    asked = os.environ.get(VARIABLE)
    if asked is not None and asked.strip().lower() in OFF:
        return "off"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    wanted = asked or os.path.join(base, NAME)
    spare = os.path.join(tempfile.gettempdir(), f"{NAME}-{os.getuid()}")
    found = next((folder for folder in (wanted, spare) if _is_writable(Path(folder))), "off")
    if found != wanted:
        log.warning("compiled kernels are kept in %s, because %s cannot be written; %s names another folder", found, wanted, VARIABLE)
    os.environ[VARIABLE] = found
    return found


def _is_writable(folder: Path) -> bool:
    """Whether it is this user's own folder, or can be made, and takes files. Code of somebody else's is not run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
