"""A file of a program around the Trainer: whose it is, what it names, and its launcher."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from parplan.planner.export.deepspeed.deepspeed import DEEPSPEED
from parplan.planner.export.fields.arguments import Given
from parplan.planner.export.fields.harmless import STARTING, is_harmless
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.files.nested_file import nested_arguments
from parplan.planner.export.files.shell_words import shell_arguments
from parplan.planner.export.hugging_face.accelerate import ACCELERATE, launch_keys
from parplan.planner.export.hugging_face.accelerate_deepspeed import (
    as_deepspeed,
    is_deepspeed,
    of_launch_line,
)
from parplan.planner.export.hugging_face.hf_trainer import HUGGINGFACE, renamed
from parplan.planner.export.wrappers.axolotl import AXOLOTL
from parplan.planner.export.wrappers.llama_factory import LLAMA_FACTORY
from parplan.planner.export.wrappers.llama_factory_megatron import (
    LLAMA_FACTORY_MEGATRON,
    runs_megatron,
)
from parplan.planner.export.wrappers.swift import SWIFT
from parplan.planner.export.wrappers.trl import TRL
from parplan.planner.export.wrappers.wrapper import PLAIN, Wrapper, run_by
from parplan.profiles.documents.bounded import read_text
from parplan.profiles.errors import ConfigError

WRAPPERS = (SWIFT, AXOLOTL, LLAMA_FACTORY, TRL)
_SECTION = "fsdp_config"
_NESTED = (".yaml", ".yml", ".json")
_NAMED = {  # arguments that name a file, and the section that its keys belong to
    "deepspeed": "",
    "deepspeed_config": "",
    "deepspeed_config.deepspeed_config_file": "",
    _SECTION: f"{_SECTION}.",
    "config_file": "",
    "config": "",
}
_TYPE = "distributed_type"  # of accelerate's YAML
_STARTED = "num_processes"  # of accelerate
_LAUNCH = (_TYPE, "use_fsdp", "multi_gpu", "parallelism_config_")
_OTHERS = re.compile(r"\bmegatron\s+(?:sft|pt|rlhf)\b")  # ms-swift on Megatron-Core
_METHODS = r"(?:online_)?(?:dpo|kto|grpo|rloo|ppo|orpo|cpo|gkd|xpo|rlhf|reward|reward_modeling)"
_BESIDE = re.compile(
    rf"\b(?:trl|swift)[ \t]+{_METHODS}\b|(?<![\w.-]){_METHODS}(?:_\w{{1,40}})?\.py\b"
)
_KEY = re.compile(r"[a-z]\w*(?:\.\w+)*")
_MOST_USES = 500  # variables of a script that have their values
_DEEPEST = 2  # files that name files: a script, accelerate's YAML, a JSON
_LONGEST = 200  # letters of a word of a command line, and of a variable's value
_VALUE = re.compile(
    r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=[\"']?([\w./:-]{1,200})[\"']?[ \t]*$", re.MULTILINE
)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_PROCESSES = re.compile(r"\b(NPROC_PER_NODE|NNODES)=(\d{1,6})\b")
_VARIABLES = {"NPROC_PER_NODE": "--nproc_per_node", "NNODES": "--nnodes"}


def wrapped_file(text: str, path: Path) -> tuple[Target, tuple[Given, ...]] | None:
    """Returns the launcher that runs a wrapper's file, and the arguments of it.

    None for a file of none of them. Raises ConfigError, also where a file that it names is missing.
    """
    if _OTHERS.search(text):
        return None
    nested = path.suffix in _NESTED
    _require_one_model("" if nested else text, path)
    given = nested_arguments(text, str(path)) if nested else tuple(_of_script(text, path))
    wrapper = _wrapper_of("" if nested else text, given)
    launched = not nested and "accelerate launch" in text
    required = wrapper is not None or launched or _names_fsdp(given)
    given = of_launch_line(given)
    given = (*_of_named(given, path, required=required), *given)  # the command line counts
    wrapper = wrapper or _wrapper_of("", given)
    if wrapper is None:
        if not is_deepspeed(given) and not _names_fsdp(given):
            return None
        wrapper = PLAIN
    target, given = _run_by(wrapper, text, given)
    known = {row.name for row in target.rows}
    if not nested and not any(each.name in known for each in given):
        raise ConfigError(
            f"{path}: it does not name the file that {wrapper.name} reads",
            hint="read that file",
        )
    if any(each.name == _STARTED for each in given):
        target = replace(target, processes=((_STARTED,),))
    return target, given


def _require_one_model(script: str, path: Path) -> None:
    """Raises ConfigError for a program that trains by preferences or rewards, beside a model."""
    found = _BESIDE.search(_code(script))
    if found:
        raise ConfigError(
            f"{path}: {found[0].strip()} runs another model beside the one that it trains, which "
            f"has no price",
            hint="read a script of supervised training",
        )


def _run_by(
    wrapper: Wrapper, text: str, given: tuple[Given, ...]
) -> tuple[Target, tuple[Given, ...]]:
    """Returns the launcher that a wrapper starts, and its arguments by the launcher's names.

    Raises ConfigError for a configuration that is neither a file nor in place.
    """
    if wrapper is LLAMA_FACTORY and runs_megatron(text, given):
        return LLAMA_FACTORY_MEGATRON, given
    given = tuple(each for each in given if each.name != _SECTION)  # whose keys follow
    if not any(each.name == _TYPE for each in given):
        given = tuple(map(renamed, given))
    given = wrapper.completed(given)
    _require_files(given)
    if is_deepspeed(given):
        return run_by(wrapper, DEEPSPEED), as_deepspeed(given)
    if _names_deepspeed(given):
        inline = (replace(each, name=each.name.removeprefix("deepspeed.")) for each in given)
        return run_by(wrapper, DEEPSPEED), tuple(inline)
    if any(each.name.startswith(_LAUNCH) for each in given):
        return run_by(wrapper, ACCELERATE), tuple(launch_keys(given))
    return run_by(wrapper, HUGGINGFACE), given


def _require_files(given: Iterable[Given]) -> None:
    """Raises ConfigError for an argument that should name a file of keys and names none."""
    for each in given:
        word = each.words[0] if each.words else ""
        if each.name in _NAMED and not word.endswith(_NESTED):
            raise ConfigError(
                f"{each.where}: {each.name} {word}: it names no YAML or JSON",
                hint="write the name of the file, or its keys",
            )


def _names_deepspeed(given: Iterable[Given]) -> bool:
    sections = ("deepspeed", "zero_optimization")
    return any(each.name.partition(".")[0] in sections for each in given)


def _names_fsdp(given: Iterable[Given]) -> bool:
    """Tells that the section of FSDP is in a file of its own."""
    return any(each.name == _SECTION and each.words[0].endswith(".json") for each in given)


def _wrapper_of(text: str, given: tuple[Given, ...]) -> Wrapper | None:
    """Returns the program of a command line, or else of the arguments."""
    code = _code(text)
    started = (one for one in WRAPPERS for program in one.programs if re.search(program, code))
    return next(started, None) or next((one for one in WRAPPERS if one.has(given)), None)


def _code(text: str) -> str:
    """Returns a script without comments, whose plain variables have their values."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    values = dict(_VALUE.findall(code))
    uses = count()

    def value(found: re.Match[str]) -> str:
        known = found[1] in values and next(uses) < _MOST_USES
        return values[found[1]] if known else found[0]

    return _VARIABLE.sub(value, code)


def _of_script(text: str, path: Path) -> Iterator[Given]:
    """Yields the arguments of a script, those of the file that its program reads before them."""
    for variable, number in _PROCESSES.findall(text):
        yield Given(_VARIABLES[variable], (number,), str(path))
    for line in _code(text).splitlines():
        yield from _of_program(line.split(), path)
    for each in shell_arguments(text, str(path)):
        if is_harmless(each.name, STARTING) or not each.name.startswith("--"):
            yield each
        else:
            plain = each.name.removeprefix("--").replace("-", "_")
            yield from _inline(replace(each, name=plain, words=each.words or ("true",)))


def _of_program(words: list[str], path: Path) -> Iterator[Given]:
    """Yields the keys of a file that a program on this line reads, and what follows it."""
    for place, word in enumerate(words):
        if not word.endswith(_NESTED) or place == 0:
            continue
        before = " ".join(each[:_LONGEST] for each in words[max(0, place - 3) : place])
        before = before.removesuffix(" --config")
        named = any(re.search(f"{one}$", before) for each in WRAPPERS for one in each.programs)
        if not named and not before.endswith(".py"):
            continue
        yield from _of_file(word.strip("'\""), "", path, required=named)
        for name, equals, value in (each.partition("=") for each in words[place + 1 :]):
            if equals and _KEY.fullmatch(name):
                yield Given(name, (value.strip("'\""),), str(path))
        return


def _inline(given: Given) -> Iterator[Given]:
    """Yields an argument, or the keys of a JSON that it has in its place."""
    if not given.words[0].startswith("{"):
        yield given
        return
    for each in nested_arguments(" ".join(given.words), given.where):
        yield replace(each, name=f"{given.name}.{each.name}", where=given.where)


def _of_named(
    given: tuple[Given, ...], path: Path, *, required: bool, depth: int = 0
) -> Iterator[Given]:
    """Yields the keys of the files that arguments name, and of those that these name."""
    for each in given:
        word = each.words[0] if each.words else ""
        if each.name not in _NAMED or not word.endswith(_NESTED):
            continue
        found = tuple(_of_file(word, _NAMED[each.name], path, required=required))
        if depth < _DEEPEST:
            yield from _of_named(found, path, required=required, depth=depth + 1)
        yield from found


def _of_file(named: str, section: str, path: Path, *, required: bool) -> Iterator[Given]:
    """Yields the keys of a file beside `path`, or in the repository that it is in."""
    places = (folder / named for folder in path.resolve().parents)
    place = next((place for place in places if place.is_file()), None)
    if place is None:
        if required:
            raise ConfigError(f"{path}: there is no {named} beside the file", hint="put it there")
        return
    for each in nested_arguments(read_text(place, lossy=True), str(place)):
        yield replace(each, name=f"{section}{each.name}")
