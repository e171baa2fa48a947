"""Words on the command line -> the job's configuration, by Hydra; whatever is wrong with them is one clear ConfigError.

Values of paths and names are taken as they are typed and never shown to Hydra, whose grammar rejects or misreads `=`,
brackets, commas, quotes, `$` and letters beyond ASCII in them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ConfigError
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONFIG_MODULE = "longscan.conf"
AS_TYPED = (
    "model.path",
    "model.revision",
    "model.tokenizer",
    "input.path",
    "input.text_column",
    "input.id_column",
    "input.tokens_column",
    "output.path",
    "cluster.address",
)
"""Keys whose values arrive as they were typed, but for `null`, which unsets the optional ones."""
OPTIONAL = ("model.revision", "model.tokenizer", "input.id_column", "input.tokens_column", "cluster.address")


def compose_job(words: Sequence[str], *, config_dir: str | None = None, config_name: str | None = None) -> JobConfig:
    """The configuration that `words`, overrides in Hydra's grammar, ask for. Raises ConfigError.

    config_dir: a folder of further YAML files. config_name: the one to start from; by default `config`, or `demo` where
    no input is named.
    """
    typed, overrides = _set_apart(words)
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir: expected a folder, found none at {config_dir}")
        overrides = [*overrides, f"hydra.searchpath=[{_quoted(Path(config_dir).resolve().as_uri())}]"]
    name = config_name or ("config" if "input.path" in typed else "demo")
    ConfigStore.instance().store(name="schema", node=JobConfig)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            composed = compose(name.removesuffix(".yaml"), overrides=list(overrides))
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, JobConfig)
    for key, value in typed.items():
        section, field = key.split(".")
        setattr(getattr(config, section), field, None if value == "null" and key in OPTIONAL else value)
    return config


def all_keys(kind: Any = JobConfig, prefix: str = "") -> list[str]:
    """Every key of the configuration, dotted."""
    keys: list[str] = []
    for field in fields(kind):
        default = field.default_factory() if callable(field.default_factory) else field.default
        keys += all_keys(type(default), f"{prefix}{field.name}.") if is_dataclass(default) else [prefix + field.name]
    return keys


def spelled_defaults(kind: Any = JobConfig, prefix: str = "  ") -> str:
    """A line a key with its default, for the help."""
    lines = []
    for field in fields(kind):
        default = field.default_factory() if callable(field.default_factory) else field.default
        if is_dataclass(default):
            lines.append(spelled_defaults(type(default), f"{prefix}{field.name}."))
        else:
            lines.append(
                f"{prefix}{field.name}={'null' if default is None else str(default).lower() if isinstance(default, bool) else default}"
            )
    return "\n".join(lines)


def explain(error: Exception) -> str:
    """What Hydra or OmegaConf found wrong, in a line, with the nearest key that exists."""
    cause: BaseException = error
    while isinstance(cause, ConfigCompositionException) and cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = lines[0] if lines else type(cause).__name__
    if isinstance(cause, MissingConfigException):
        text = " ".join(lines[:3])
    if isinstance(cause, OmegaConfBaseException) and getattr(cause, "full_key", None):
        text = f"{cause.full_key}: {text}"
    if "LexerNoViableAltException" in text or "error parsing override" in str(error).lower() or "mismatched input" in text:
        text = f"{' '.join(str(error).split())}; quote a value that holds brackets, commas or spaces: key=\"'value'\""
    wrong = re.search(r"[Kk]ey '([\w.]+)'", text) or re.match(r"([\w.]+): ", text)
    full = getattr(cause, "full_key", None) or (wrong.group(1) if wrong else None)
    near = difflib.get_close_matches(full, all_keys(), n=1, cutoff=0.5) if full and full not in all_keys() else []
    return text + (f"; did you mean {near[0]}?" if near else "")


def _set_apart(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Values of AS_TYPED by key, and the words that are left for Hydra."""
    typed: dict[str, str] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not (key[0].isalpha()):
            raise ConfigError(f"expected key=value, got {word!r}; `longscan --help` lists the keys")
        if key in AS_TYPED:
            typed[key] = value
        else:
            rest.append(word)
    return typed, rest


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
