"""Hostile names in plans that are exported, and the lines that they wrote.

    injected(name, content)      what a name wrote in one file of an export
    obeyed(text)                 a control character that reached the terminal

A name may hold any text, and each hostile one has the word `evil`. A file may have that word in a
comment, in an argument of a script, or in a text of YAML, JSON, Python or HTML. Bash reads each
script in a folder of its own without any program on its path.
"""

from __future__ import annotations

import ast
import copy
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import yaml

from benchmarks.commands.fuzzing.mutations import at, paths, put
from benchmarks.commands.fuzzing.seeds import Seeds
from tests.planner.export.test_hostile_names import STUBS

MARK = "evil"
NEEDS = ("plan-exported", "plan-exported-pp", "plan-one", "plan-llama")
OUTPUT = "out"
FRAGMENTS = (
    *("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\x1b[2J", "\u202e"),
    *("'", '"', "`", "\\", "$(", "${x:-", ")", "}", ";", "&&", "|", "&", " ", "\t", "#", "<", ">"),
    *("---\n", "...\n", "- ", ": ", "{a: ", "[", "]", "*", "%", "!!python/object/apply:os.system "),
    *('"""', "'''", "\nimport os\n", "# coding: utf-7\n", "+AAo-", "coding=utf-7", "{{", "\\n"),
    *(
        "#SBATCH --wrap=",
        "#!/bin/",
        "\n#SBATCH --wrap=",
        "read back with --model ",
        "-x --",
        "\\u0022",
    ),
    *("</script><", "<!--", "-->", "&#10;", "\u00b2", "\u65e5\u672c", "\U0001f525", "a", "0", "~"),
)
TARGETS = (
    *("megatron", "megatron-bridge", "torchtitan", "deepspeed", "fsdp2", "huggingface"),
    *("galvatron", "accelerate", "torchrun", "slurm", "kubernetes"),
)
LAUNCHES = ("", "", " --launch slurm", " --launch kubernetes")
REPORTS = ("report PLAN -o out/page.html", "trace PLAN -o out/trace.json")
_LONGEST_NAME = 120  # bytes of a file's name, which has to be one
LIMIT_S = 20.0
_JOB_NAME = re.compile(r"#SBATCH --job-name=[a-z0-9-]{1,63}")  # letters of a name, and nothing else
NODES = "SLURM_JOB_NODELIST=n"


def hostile_text(chance: Random) -> str:
    """Return a text with the mark, between one and six parts that end or begin something."""
    parts = [chance.choice(FRAGMENTS) for _ in range(chance.randint(1, 6))]
    parts.insert(chance.randrange(len(parts) + 1), f"{MARK} ")
    parts.insert(chance.randrange(len(parts) + 1), chance.choice((MARK, "", "")))
    return "".join(parts)


def make(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    """Return a plan with hostile texts, under a hostile name, that a command writes anew."""
    tree = copy.deepcopy(seeds.tree(chance.choice(NEEDS)))
    texts = [path for path in paths(tree) if isinstance(at(tree, path), str)]
    names = [path for path in texts if path[-1] in ("name", "source", "precision_file")]
    for _ in range(chance.choice((0, 1, 1, 2))):
        put(tree, chance.choice(names if chance.random() < 0.8 else texts), hostile_text(chance))
    content = yaml.safe_dump(tree, sort_keys=False, allow_unicode=chance.random() < 0.5).encode()
    file_name = "p.yaml"
    if chance.random() < 0.6:
        file_name = _file_name(hostile_text(chance)) + chance.choice(
            (".yaml", ".yaml", "", ".json")
        )
    given = f"./{file_name}" if file_name.startswith("-") else file_name
    line = chance.choice(
        (
            *(
                f"export PLAN --to {target}{chance.choice(LAUNCHES)} -o {OUTPUT}"
                for target in TARGETS
            ),
            "show PLAN",
            *REPORTS,
        )
    )
    return {
        "arguments": tuple(given if word == "PLAN" else word for word in line.split()),
        "files": {file_name: content},
        "folders": (OUTPUT,),
        "outputs": (OUTPUT,),
    }


def _file_name(text: str) -> str:
    plain = text.replace("/", "").replace("\0", "").encode()[:_LONGEST_NAME]
    return plain.decode("utf-8", "ignore") or "p"


def injected(name: str, content: bytes) -> str:
    """Return what a hostile name wrote in a file, "" for nothing."""
    text = content.decode("utf-8")
    if name.endswith(".json"):
        return _keys(json.loads(text))
    if name.endswith((".yaml", ".yml")):
        documents = list(yaml.safe_load_all(text))
        return "a second document" if len(documents) > 1 else _keys(documents)
    if name.endswith(".py"):
        return _python(content)
    if name.endswith(".html"):
        return _html(text)
    return _shell(text)


def obeyed(text: str) -> str:
    """Return the first character that a terminal would obey, "" for none."""
    for each in text:
        if not each.isprintable() and each not in "\n\r\t":
            return f"U+{ord(each):04X}"
    return ""


def _keys(tree: Any) -> str:
    if isinstance(tree, Mapping):
        wrong = next((str(key) for key in tree if MARK in str(key)), "")
        return f"key {wrong}" if wrong else next(filter(None, map(_keys, tree.values())), "")
    if isinstance(tree, list):
        return next(filter(None, map(_keys, tree)), "")
    return ""


def _python(content: bytes) -> str:
    """Return a name of the code that has the mark; texts may have it."""
    for node in ast.walk(ast.parse(content)):
        for field, value in ast.iter_fields(node):
            if isinstance(value, str) and MARK in value and not isinstance(node, ast.Constant):
                return f"{type(node).__name__}.{field}"
    return ""


def _shell(text: str) -> str:
    """Return a directive with the mark, or what bash says or leaves when no program is there."""
    for line in text.replace("\r", "\n").splitlines():  # every character that could end a line
        directive = line.startswith(("#!", "#SBATCH")) and not _JOB_NAME.fullmatch(line)
        if MARK in line and directive:
            return f"directive {line}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script").write_text(text, encoding="utf-8")
        done = subprocess.run(
            ["env", "-i", "LC_ALL=C.UTF-8", "bash", "-c", f"{STUBS}export {NODES}\n. ./script"],
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
        left = sorted(path.name for path in Path(folder).iterdir())
    return done.stderr or ("" if left == ["script"] else f"it wrote {left}")


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.wrong = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if MARK in tag or any(MARK in name for name, _ in attrs):
            self.wrong = f"tag {tag}"


def _html(text: str) -> str:
    parser = _Tags()
    parser.feed(text)
    return parser.wrong
