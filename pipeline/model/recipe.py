"""How an embedding model wants to be used, as the sentence-transformers files in its folder say; the job's own keys come first.

modules.json                       which modules follow the network: a pooling, perhaps a normalization
1_Pooling/config.json              which pooling, and whether the prompt is in it
config_sentence_transformers.json  prompts by name, and the one that is used where none is named
sentence_bert_config.json          the longest text of its training
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longscan.pipeline.config import EmbeddingConfig, JobConfig
from longscan.pipeline.errors import ConfigError, ModelError
from longscan.pipeline.model.formats.fields import Fields, read_json, read_list
from longscan.pipeline.model.formats.files import inside
from longscan.pipeline.tokenize import TextTokenizer

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LIMITS = "sentence_bert_config.json"
POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
"""Key of a pooling's config -> the pooling; the last two are none of longscan's."""
SPELLED = {"lasttoken": "last", "weightedmean": "weighted_mean"}
"""As newer files name a pooling by a word, where that is another one."""
COMPUTED = ("mean", "last", "max", "weighted_mean")


@dataclass(frozen=True, slots=True)
class Recipe:
    pooling: str = "mean"
    normalize: bool = False
    include_prompt: bool = True
    """The prompt, and a BOS token, are in the pooling."""
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    """Longest text that the model was made for."""


def recipe_files(folder: Path) -> list[str]:
    """The files that say it, and those of the modules' own folders, relative to `folder`; none where there is no modules.json."""
    if not (folder / MODULES).is_file():
        return []
    tops = [name for name in (MODULES, PROMPTS, LIMITS) if (folder / name).is_file()]
    paths = {str(module.get("path") or "") for module in read_list(folder / MODULES)} - {""}
    outside = sorted(path for path in paths if Path(path).name != path)
    if outside:
        raise ModelError(f"{folder / MODULES}: expected paths of folders beside it, found {', '.join(outside)}. Correct the file")
    return tops + sorted(f"{path}/{file.name}" for path in paths if (folder / path).is_dir() for file in (folder / path).iterdir())


def read_recipe(folder: str | Path) -> Recipe | None:
    """What the folder says, or None where it has no modules.json. Raises ModelError for what longscan does not compute."""
    folder = Path(folder)
    if not (folder / MODULES).is_file():
        return None
    modules = [(str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))) for module in read_list(folder / MODULES)]
    others = [kind for kind, _ in modules if kind not in ("Transformer", "Pooling", "Normalize")]
    if others or [kind for kind, _ in modules].count("Pooling") != 1:
        raise ModelError(
            f"{folder / MODULES}: expected a Transformer, one Pooling and perhaps a Normalize, found "
            f"{', '.join(kind for kind, _ in modules)}: longscan does not compute that embedding. "
            "Remove modules.json to have hidden states pooled as the job says."
        )
    recipe = _pooling(inside(folder, str(Path(dict(modules)["Pooling"]) / "config.json")))
    recipe = replace(recipe, normalize="Normalize" in dict(modules))
    return _limits(folder, _prompts(folder, recipe))


def _pooling(file: Path) -> Recipe:
    config = read_json(file)
    fields = Fields(config)
    word = config.get("pooling_mode")
    chosen = [SPELLED.get(word, word)] if isinstance(word, str) else [name for key, name in POOLINGS.items() if config.get(key) is True]
    if len(chosen) != 1 or chosen[0] not in COMPUTED:
        fields.note(
            "pooling_mode", f"expected one of {', '.join(COMPUTED)}, found {' and '.join(chosen) or 'none'}; set task.embedding.pooling"
        )
    include = config.get("include_prompt", True)
    if not isinstance(include, bool):
        fields.note("include_prompt", f"expected true or false, found {include!r}")
    if fields.problems:
        raise ModelError(f"{file}: " + "; ".join(fields.problems))
    return Recipe(pooling=chosen[0], include_prompt=include)


def _prompts(folder: Path, recipe: Recipe) -> Recipe:
    file = folder / PROMPTS
    if not file.is_file():
        return recipe
    config = read_json(file)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{file}: prompts: expected texts by name, found {prompts!r}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ModelError(f"{file}: default_prompt_name: expected one of {', '.join(prompts) or 'no prompts'}, found {default!r}")
    return replace(recipe, prompts=prompts, default_prompt=default)


def _limits(folder: Path, recipe: Recipe) -> Recipe:
    file = folder / LIMITS
    if not file.is_file():
        return recipe
    config = read_json(file)
    if config.get("do_lower_case"):
        raise ModelError(f"{file}: do_lower_case: expected false, found true: longscan takes texts as they are. Lower them in the input")
    longest = config.get("max_seq_length")
    return replace(recipe, max_tokens=longest if isinstance(longest, int) and not isinstance(longest, bool) else None)


def settle(config: JobConfig, recipe: Recipe | None, tokenizer: TextTokenizer | None) -> JobConfig:
    """Replace what `auto` stands for in the embedding, and in model.append_eos; a prompt's name by its text.

    Raises ConfigError for a prompt that the model does not have, or that cannot be used.
    """
    if config.task.classifies is not None:
        plain = replace(config.task.embedding, pooling=[config.task.classify.pooling], normalize=False, truncate_dim=None, dtype="float32")
        plain = replace(plain, window_tokens=None, prompt=None, prompt_text=None, include_prompt=False)
        config = replace(config, task=replace(config.task, embedding=plain))
    asked, known = config.task.embedding, recipe or Recipe(normalize=True, include_prompt=False)
    pooling = [known.pooling] if asked.pooling == "auto" else list(asked.pooling)
    normalize = known.normalize if asked.normalize == "auto" else asked.normalize
    text = _prompt_text(config, known) if config.task.embeds else None
    include: Any = asked.include_prompt
    if include == "auto":
        include = known.include_prompt
    _check_prompt(config, pooling, text, include)
    embedding = replace(asked, pooling=pooling, normalize=normalize, prompt=None, prompt_text=text, include_prompt=include)
    end: Any = config.model.append_eos
    if end == "auto":
        end = recipe is not None and tokenizer is not None and tokenizer.adds_eos
    return replace(config, task=replace(config.task, embedding=embedding), model=replace(config.model, append_eos=end))


def _prompt_text(config: JobConfig, recipe: Recipe) -> str | None:
    """The prompt before every text, or None."""
    asked: EmbeddingConfig = config.task.embedding
    if asked.prompt_text is not None:
        return asked.prompt_text or None
    name = recipe.default_prompt if asked.prompt == "auto" else asked.prompt
    if name is None:
        return None
    if name not in recipe.prompts:
        there = ", ".join(recipe.prompts) or "none"
        raise ConfigError(f"task.embedding.prompt: expected a prompt of the model ({there}), got {name!r}; or give one as prompt_text")
    return recipe.prompts[name] or None


def _check_prompt(config: JobConfig, pooling: list[str], text: str | None, include: bool) -> None:
    if text is not None and config.input.tokens_column is not None:
        raise ConfigError(
            "task.embedding.prompt: expected texts to put it before, and input.tokens_column brings token ids; "
            "put the prompt's ids into them, or set task.embedding.prompt=null"
        )
    if text is not None and config.task.scores:
        raise ConfigError(
            f"task.embedding.prompt: expected task=embed, got task={config.task.name}: what is scored would stand behind {text!r}; "
            "set task.embedding.prompt=null, or run two jobs"
        )
    if include and "weighted_mean" in pooling and config.task.embeds:
        raise ConfigError(
            "task.embedding.include_prompt: expected false with weighted_mean, whose weights count from the document's first token; "
            "set task.embedding.include_prompt=false"
        )
