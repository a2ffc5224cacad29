"""Arguments in shell scripts and YAML files, each with the line that has it.

A script is not run. Variables that it sets to plain words are put in their places
(shell_values.py), and the last value counts. Branches that these variables decide are followed
(shell_conditions.py). Everything else stays as it stands, and is an error only where an argument
that has a price uses it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial

from parplan.planner.export.fields.arguments import Given
from parplan.planner.export.files.shell_conditions import Branches
from parplan.planner.export.files.shell_values import filled

_ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_ARRAY = re.compile(r"^\s*(?:export\s+|declare\s+-a\s+)?[A-Za-z_]\w*\+?=\(")
_OF_YAML = re.compile(r"(--[\w.-]+):")
_OVERRIDE = re.compile(
    r"^\+{0,2}([A-Za-z_]\w*(?:\.\w+)+|mixed_precision|comm_overlap|training)=(.+)$"
)
_SHORT = re.compile(r"^-(tp|pp|cp|vp|ep|etp|gb|mb|sl|ms)$")  # of Megatron-Bridge
_JOB = "#SBATCH"
_OF_A_JOB = {  # variables that Slurm sets from an option of the job
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--gpus-per-node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}


@lru_cache(maxsize=4)
def shell_arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the arguments `--name words..` and overrides `a.b=word` of a script, in order."""
    variables: dict[str, str] = {}
    found: list[Given] = []
    inside = False  # an array that goes on
    branches = Branches()
    for number, whole in _logical_lines(text):
        line = branches.code_of(whole, partial(_filled, variables=variables))
        assigned = None if inside else _ASSIGNED.match(line)
        inside = _goes_on(line, inside=inside)
        if assigned and "--" not in assigned[2]:
            words = _words(_filled(assigned[2], variables))
            if len(words) == 1:
                variables[assigned[1]] = words[0]
            if len(words) <= 1:  # with more, it is a command and a variable of its own
                continue
        arguments = tuple(_arguments(line, number, file, variables))
        found.extend(arguments)
        variables |= {
            variable: each.words[0]
            for each in arguments
            for variable in _OF_A_JOB.get(each.name, ())
            if each.words and variable not in variables
        }
    return tuple(found)


def yaml_arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the arguments of a YAML file with lines `--name: words`; a switch is `true`."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.strip()
        match = _OF_YAML.match(code)
        if match is None:
            continue
        value = code[match.end() :].partition("#")[0].strip()
        if value.lower() == "false":
            continue
        value = value.strip("'\"")
        words = (
            () if value.lower() == "true" else tuple(value.strip("[]").replace(",", " ").split())
        )
        found.append(Given(match[1], words, f"{file}:{number}"))
    return tuple(found)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the lines with those that continue them, each with the number of its first line."""
    held, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        start = start if held else number
        line = line.removeprefix(_JOB)
        if line.lstrip().startswith("#"):
            continue
        if line.rstrip().endswith("\\"):
            held += f"{line.rstrip()[:-1]} \n"
            continue
        yield start, held + line
        held = ""
    if held:
        yield start, held


def _goes_on(line: str, *, inside: bool) -> bool:
    """True if a line ends inside an array; `inside` says that it begins in one."""
    code = re.sub(r"(^|\s)#.*", "", line)
    open_brackets = code.count("(") - code.count(")")
    return open_brackets >= 0 if inside else bool(_ARRAY.match(line)) and open_brackets > 0


def _words(line: str) -> list[str]:
    """Returns the words of a line without its comment and its quotes."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that goes on in the next line
        return re.sub(r"\s#.*", "", line).replace('"', " ").replace("'", " ").split()


def _arguments(line: str, number: int, file: str, variables: Mapping[str, str]) -> Iterator[Given]:
    name, place = "", number
    words: list[str] = []
    for offset, part in enumerate(_ARRAY.sub(" ", line).split("\n")):
        for word in _separate(_words(part)):
            given_word = _filled(word, variables)
            override = _OVERRIDE.match(given_word)
            begins = (given_word.startswith("--") and len(given_word) > 2) or _SHORT.match(
                given_word
            )
            if not (begins or override):
                words.append(given_word)
                continue
            if name:
                yield Given(name, tuple(words), f"{file}:{place}")
            name, place = given_word, number + offset
            words = []
            if override or "=" in given_word:
                name, _, value = given_word.lstrip("+").partition("=")
                words = [value.strip("'\"")]
            if words:  # it has no further words
                yield Given(name, tuple(words), f"{file}:{place}")
                name = ""
    if name:
        yield Given(name, tuple(words), f"{file}:{place}")


def _separate(words: list[str]) -> Iterator[str]:
    """Yields the words, those of a quoted list of arguments one by one, without array brackets."""
    for word in words:
        parts = word.split() if "--" in word and " " in word else [word]
        for part in parts:
            closed = part[:-1] if part.endswith(")") and part.count(")") > part.count("(") else part
            if closed:
                yield closed


def _filled(word: str, variables: Mapping[str, str]) -> str:
    return filled(word, variables).strip("'\"")
