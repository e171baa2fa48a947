"""Words on the command line -> the job's configuration, by Hydra; whatever is wrong with them is one clear ConfigError.

Values of paths and names are taken as they are typed and never shown to Hydra, whose grammar rejects or misreads `=`,
brackets, commas, quotes, `$` and letters beyond ASCII in them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from longscan.pipeline.config import JobConfig
from longscan.pipeline.errors import ConfigError
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

CONFIG_MODULE = "longscan.conf"
SECTIONS = {
    "model": "model/default.yaml",
    "input": "input/default.yaml",
    "task": "task/base.yaml",
    "engine": "engine/default.yaml",
    "output": "output/default.yaml",
    "cluster": "cluster/base.yaml",
    "": "config.yaml",
}
"""Section of the configuration -> the YAML file with its defaults."""
AS_TYPED = (
    "model.path",
    "model.revision",
    "model.tokenizer",
    "model.tokenizer_revision",
    "input.path",
    "input.state_path",
    "input.text_column",
    "input.id_column",
    "input.tokens_column",
    "input.positions_column",
    "output.path",
    "cluster.address",
    "task.embedding.prompt",
    "task.embedding.prompt_text",
    "task.classify.head",
)
"""Keys whose values arrive as they were typed, but for `null`, which unsets the optional ones."""
OPTIONAL = (
    "model.revision",
    "model.tokenizer",
    "model.tokenizer_revision",
    "input.state_path",
    "input.id_column",
    "input.tokens_column",
    "input.positions_column",
    "cluster.address",
    "task.embedding.prompt",
    "task.embedding.prompt_text",
    "task.classify.head",
)


def compose_job(words: Sequence[str], *, config_dir: str | None = None, config_name: str | None = None) -> JobConfig:
    """The configuration that `words`, overrides in Hydra's grammar, ask for. Raises ConfigError.

    config_dir: a folder of further YAML files. config_name: the one to start from; by default `config`, or `demo` where
    no input is named.
    """
    typed, overrides = _set_apart(words)
    names_input = "input.path" in typed or any(word.startswith("input=") for word in overrides)
    name = (config_name or ("config" if names_input else "demo")).removesuffix(".yaml")
    ConfigStore.instance().store(name="schema", node=JobConfig)
    GlobalHydra.instance().clear()
    try:
        with _started(config_dir, name) as searchpath:
            composed = compose(name, overrides=overrides + searchpath)
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, JobConfig)
    for key, value in typed.items():
        section, _, field = key.rpartition(".")
        setattr(attrgetter(section)(config), field, None if value == "null" and key in OPTIONAL else value)
    return config


@contextmanager
def _started(config_dir: str | None, name: str) -> Iterator[list[str]]:
    """Hydra, with the folder that holds the file to start from as its first source; yields the override that names the second."""
    if config_dir is None:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            yield []
        return
    folder = Path(config_dir).resolve()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir: expected a folder, found none at {config_dir}")
    if (folder / f"{name}.yaml").is_file():
        with initialize_config_dir(str(folder), version_base="1.3"):
            yield [f"hydra.searchpath=[pkg://{CONFIG_MODULE}]"]
    else:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            yield [f"hydra.searchpath=[{_quoted(f'file://{folder}')}]"]


def all_keys(kind: Any = JobConfig, prefix: str = "") -> list[str]:
    """Every key of the configuration, dotted, and every section."""
    keys: list[str] = []
    for field in fields(kind):
        default = field.default_factory() if callable(field.default_factory) else field.default
        keys.append(prefix + field.name)
        if is_dataclass(default):
            keys += all_keys(type(default), f"{prefix}{field.name}.")
    return keys


def spelled_keys() -> str:
    """A line a key with its default and what it means, from the YAML files that say both."""
    lines = []
    for section, file in SECTIONS.items():
        above: list[str] = [section] if section else []
        for line in (files(CONFIG_MODULE) / file).read_text("utf-8").partition("_self_")[2 if not section else 0].splitlines():
            found = re.fullmatch(r"( *)(\w+): *(\S*)(?: *# (.*))?", line)
            if found is None or found[2] == "defaults":
                continue
            path = [*above[: len(found[1]) // 2 + len([section] if section else [])], found[2]]
            above = path
            if found[3]:
                lines.append(f"  {'.'.join(path)}={found[3].strip(chr(34))}".ljust(42) + (found[4] or ""))
    return "\n".join(line.rstrip() for line in lines)


def explain(error: Exception) -> str:
    """What Hydra or OmegaConf found wrong, in a line, with the nearest name that exists."""
    cause: BaseException = error
    while isinstance(cause, ConfigCompositionException) and cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = lines[0] if lines else type(cause).__name__
    if isinstance(cause, MissingConfigException):
        return _no_such_file(lines)
    if isinstance(cause, YAMLError):
        return f"a YAML file cannot be read: {' '.join(lines)}"
    if isinstance(cause, OverrideParseException):
        return f"{cause.override}: {text}; quote a value that holds brackets, commas, colons or spaces: key=\"'value'\""
    full = getattr(cause, "full_key", None)
    in_file = re.match(r"In '([^']+)': \w+ raised while composing config", text)
    if in_file is not None and len(lines) > 1:
        text = f"{lines[1]} in {in_file[1]}.yaml"
        full = next((line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")), None)
    if full and re.match(r"Key '[^']*' not in '", text):
        text = "no such key" + text.partition("Config'")[2]
    if "is not a ListConfig, list or tuple" in text:
        text = "expected a list, written [a,b]; of one [a]"
    near = near_keys(str(full)) if full else []
    return (f"{full}: " if full else "") + text + (f"; did you mean {' or '.join(near)}?" if near else "")


def near_keys(key: str) -> list[str]:
    """Keys that `key`, which is none, may have been meant as: those of the same last name, else the one that is spelled most alike."""
    keys = all_keys()
    if key in keys:
        return []
    last = key.rpartition(".")[2]
    return [known for known in keys if known.rpartition(".")[2] == last] or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)


def _no_such_file(lines: Sequence[str]) -> str:
    """`lines`: Hydra's message: what it could not find, then the options there are, or where it has looked."""
    wanted = re.search(r"Could not find '([^']+)'|[Cc]annot find primary config '([^']+)'", lines[0])
    if wanted is None:
        return " ".join(lines)
    if wanted[2]:
        return f"--config-name: found no {wanted[2]}.yaml, neither in longscan's own YAML files nor in --config-dir"
    group, _, option = wanted[1].rpartition("/")
    options = [line for line in lines[1:] if line != "base" and re.fullmatch(r"[\w-]+", line)]
    if f"{group}.path" in AS_TYPED:
        return f"{group}={option}: {group} is no key by itself; did you mean {group}.path={option}?"
    near = difflib.get_close_matches(option, options, n=1, cutoff=0.5)
    return f"{group}={option}: expected one of {', '.join(options)}" + (f"; did you mean {group}={near[0]}?" if near else "")


def _set_apart(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Values of AS_TYPED by key, and the words that are left for Hydra."""
    typed: dict[str, str] = {}
    rest = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key[:1].isalpha() or key.startswith("hydra."):
            raise ConfigError(f"expected key=value, got {word!r}; `longscan --help` lists the keys")
        if key in AS_TYPED:
            typed[key] = value
        else:
            rest.append(word)
    return typed, rest


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
