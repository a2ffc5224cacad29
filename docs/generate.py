"""Writes the pages of docs/reference that repeat the code: options of commands, fields of files.

    python -m docs.generate

`tests/docs/test_reference.py` fails while a page differs from what the code gives.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

REFERENCE = Path(__file__).parent / "reference"
NOTE = (
    "This page is generated: `python -m docs.generate` writes it from the code, "
    "and a test compares the two."
)
FILES_OF_RESULTS = {  # results that are files, with the pages of their fields
    "plan_schema": "a [plan](plan-fields.md)",
    "profile_schema": "a [profile](profile-fields.md)",
    "RunFile": "a [run](run-fields.md)",
    "draft_schema": "the path and the content of a [cluster file](../guide/cluster-files.md)",
}
HELP_NAMES = ("-h", "--help")
JSON_WORDS = {"boolean": "true or false", "null": "null", "object": "mapping", "string": "text"}


def pages() -> dict[str, str]:
    """The content of every generated page by its file name."""
    from parplan.planner.runs.run_file import RunFile
    from parplan.profiles.documents.schema import json_schema
    from parplan.profiles.machines.user_profile import profile_schema as profile_schema
    from parplan.report.plan_documents import plan_schema

    schemas = {"plan": plan_schema(), "profile": profile_schema(), "run": json_schema(RunFile)}
    fields = {
        f"{kind}-fields.md": fields_page(kind, schema, _explaining(kind))
        for kind, schema in schemas.items()
    }
    return {"commands.md": commands_page(_commands()), "json.md": json_page(), **fields}


def _explaining(kind: str) -> str:
    return (REFERENCE / f"{kind}-file.md").read_text(encoding="utf-8")


def _commands() -> dict[str, click.Command]:
    """Every command by what is typed to start it."""
    from parplan import cli
    from parplan.executor.__main__ import main as executor
    from parplan.profiles.profile_comm import main as profile_comm

    context = click.Context(cli.main)
    subcommands = {
        f"plan {name}": cli.main.get_command(context, name)
        for name in cli.main.list_commands(context)
    }
    return {
        "plan": cli.main,
        **subcommands,
        "torchrun ... -m parplan.executor": executor,
        "torchrun ... -m parplan.profiles.profile_comm": profile_comm,
    }


def commands_page(commands: Mapping[str, click.Command]) -> str:
    """Every option of every command, as its help has it."""
    listing = "\n".join(
        f"- [`{name}`](#{_anchor(name)}): {_first_sentence(command)}"
        for name, command in commands.items()
    )
    sections = "\n".join(_command_section(name, command) for name, command in commands.items())
    return f"# Commands\n\n{NOTE}\n\n{listing}\n\n{sections}"


def _first_sentence(command: click.Command) -> str:
    return command.get_short_help_str(limit=1000)


def _command_section(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=name, help_option_names=list(HELP_NAMES))
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}", f"`{usage}`", inspect.cleandoc(command.help or "")]
    parts += [
        _options_table(title, records)
        for title, records in _option_records(command, context).items()
    ]
    if command.epilog:
        parts.append(f"Examples:\n\n```text\n{inspect.cleandoc(command.epilog)}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _option_records(
    command: click.Command, context: click.Context
) -> dict[str, list[tuple[str, str]]]:
    """Names and help of the options by their section."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is not None:
            sections.setdefault(getattr(param, "section", "Other"), []).append(record)
    return sections


def _options_table(title: str, records: Iterable[tuple[str, str]]) -> str:
    return _table((title, "meaning"), ((f"`{names}`", text) for names, text in records))


def json_page() -> str:
    """Every key of what commands print with `--json`, by the record that has it."""
    from parplan.commands.json_documents import json_sources
    from parplan.profiles.documents.schema import output_schema

    results = json_sources()
    schemas = {
        source.__name__: output_schema(source)
        for kinds in results.values()
        for source in kinds
        if isinstance(source, type) and source.__name__ not in FILES_OF_RESULTS
    }
    listing = _table(
        ("command", "what it prints"),
        (
            (f"`{_typed(name)}`", " or ".join(map(_result_link, kinds)))
            for name, kinds in results.items()
        ),
    )
    bodies: dict[str, Any] = {}
    for schema in schemas.values():
        bodies |= schema.pop("$defs", {})
    choices = {name: body for name, body in bodies.items() if "enum" in body}
    others = {name: body for name, body in bodies.items() if name not in choices} | schemas
    sections = [
        _mapping_section(name, others[name], choices, {}, always=True)
        for name in (*schemas, *sorted(others.keys() - schemas.keys(), key=_public))
    ]
    intro = (
        f"{NOTE} `plan schema --of COMMAND` prints the JSON Schema of the same. A key is always "
        "there, and null where it has no value. `version`, or the version of a file, changes where "
        "a key is renamed or removed, or its meaning changes. Shares are fractions of 1."
    )
    return f"# Results of --json\n\n{intro}\n\n{listing}\n\n" + "\n".join(sections)


def _typed(name: str) -> str:
    return "plan --json" if name == "plan" else f"plan {name} --json"


def _result_link(source: Any) -> str:
    """The link to the fields of one kind of result."""
    name = source.__name__
    if name in FILES_OF_RESULTS:
        return FILES_OF_RESULTS[name]
    return f"[{_public(name)}](#{_anchor(_public(name))})"


def fields_page(kind: str, schema: Mapping[str, Any], explaining: str) -> str:
    """Every key of a file, by the mapping that has it.

    The keys, their values and their defaults are those of the JSON Schema. A meaning is that of the
    class's docstring, or else that of `explaining`, the page that people wrote.
    """
    definitions: Mapping[str, Mapping[str, Any]] = schema.get("$defs", {})
    choices = {name: body for name, body in definitions.items() if "enum" in body}
    mappings = {name: body for name, body in definitions.items() if name not in choices}
    written = written_meanings(explaining, schema)
    root = _root(schema)
    sections = [_mapping_section(root["title"], root, choices, written)]
    others = sorted((name for name in mappings if mappings[name] is not root), key=_public)
    sections += [_mapping_section(name, mappings[name], choices, written) for name in others]
    intro = f"{NOTE} [The {kind} file]({kind}-file.md) explains the file as a whole."
    return f"# Fields of the {kind} file\n\n{intro}\n\n" + "\n".join(sections)


def _mapping_section(
    name: str,
    body: Mapping[str, Any],
    choices: Mapping[str, Any],
    written: Mapping[tuple[str, str], str],
    *,
    always: bool = False,
) -> str:
    """Returns the heading, the text and the table of a mapping; `always` leaves out defaults."""
    properties: Mapping[str, Mapping[str, Any]] = body.get("properties", {})
    text, meanings = split_docstring(body.get("description", ""), set(properties))
    required = set(body.get("required", ()))
    heads = ("key", "value", "meaning") if always else ("key", "value", "default", "meaning")
    cells = {
        "key": lambda key: f"`{key}`",
        "value": lambda key: type_of(properties[key], choices),
        "default": lambda key: "required" if key in required else _default(properties[key]),
        "meaning": lambda key: meanings.get(key) or written.get((body["title"], key), ""),
    }
    rows = ([cells[head](key) for head in heads] for key in properties)
    intro = f"{text}\n\n" if text else ""
    return f"## {_public(name)}\n\n{intro}{_table(heads, rows)}\n"


def written_meanings(page: str, schema: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Returns meanings from the tables of a page, by the title of the class and the field.

    The first column has paths of fields. A row may name several fields, of which the later ones are
    written without the path that they share with the first. Raises KeyError for a path that the
    schema lacks.
    """
    meanings: dict[tuple[str, str], str] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 2 or not re.match(r"`[a-z_]", cells[0]):
            continue
        for path in _paths(cells[0]):
            root = (
                schema["$defs"]["TracedPlan"]
                if _is_of_a_traced_module(page, line)
                else _root(schema)
            )
            meanings.setdefault(_field(path, root, schema), cells[1])
    return meanings


def _paths(cell: str) -> list[str]:
    """The whole paths of `model.num_layers`, `hidden_size`."""
    first, *others = re.findall(r"`([^`]+)`", cell)
    parent = first.rpartition(".")[0]
    return [first, *(f"{parent}.{name.removeprefix('.')}" if parent else name for name in others)]


def _is_of_a_traced_module(page: str, line: str) -> bool:
    heading = page.find("## The plan of a traced module")
    return 0 <= heading < page.find(line)


def _field(path: str, root: Mapping[str, Any], schema: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the title of the class and the field that a path such as `stages[].plan` ends at."""
    body, owner, key = root, root, ""
    for word in path.replace("[]", "").split("."):
        if word.isupper():  # the name of an entry
            body = _inner(body, schema)
            continue
        owner, key = body, word
        body = _inner(body["properties"][word], schema)
    return owner["title"], key


def _root(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the mapping of the file: the schema, or its first kind of file."""
    return schema if "properties" in schema else _inner(schema, schema)


def _inner(value: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping that a value is, or that its entries are."""
    if "$ref" in value:
        inner: Mapping[str, Any] = schema["$defs"][value["$ref"].rsplit("/", 1)[-1]]
        return inner
    if "anyOf" in value:
        return _inner(next(one for one in value["anyOf"] if one.get("type") != "null"), schema)
    if value.get("type") == "array":
        return _inner(value.get("items", {}), schema)
    if "properties" not in value and isinstance(value.get("additionalProperties"), Mapping):
        return _inner(value["additionalProperties"], schema)
    return value


def split_docstring(docstring: str, fields: set[str]) -> tuple[str, dict[str, str]]:
    """Splits a docstring into sentences and the meanings of fields.

    A meaning is a line `name: meaning` or `name, name   meaning`.
    """
    sentences: list[str] = []
    meanings: dict[str, str] = {}
    open_names: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        match = re.match(r"(\w+(?:, \w+)*)(?::\s+|\s{2,})(\S.*)", line)
        names = match[1].split(", ") if match else []
        if match and fields.issuperset(names):
            open_names = names
            meanings |= dict.fromkeys(names, match[2])
        elif open_names and line.startswith(" "):
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in open_names}
        else:
            open_names = []
            sentences.append(line)
    return _paragraphs("\n".join(sentences)), meanings


def _paragraphs(text: str) -> str:
    """The text without the headings of lists that went into the table."""
    parts = (part.strip() for part in text.split("\n\n"))
    return "\n\n".join(part for part in parts if part and not part.endswith(":"))


def type_of(value: Mapping[str, Any], choices: Mapping[str, Any]) -> str:
    """Says the values of a key in words."""
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[-1]
        if name in choices:
            return type_of(choices[name], choices)
        return f"[{_public(name)}](#{_anchor(_public(name))})"
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "anyOf" in value:
        return " or ".join(type_of(one, choices) for one in value["anyOf"])
    if value.get("type") == "array":
        return _list_of(value, choices)
    if isinstance(value.get("additionalProperties"), Mapping):
        return f"mapping of {type_of(value['additionalProperties'], choices)}"
    kind = value.get("type", "any value")
    return JSON_WORDS.get(kind, kind)


def _list_of(value: Mapping[str, Any], choices: Mapping[str, Any]) -> str:
    if "prefixItems" in value:
        return "list of " + ", ".join(type_of(item, choices) for item in value["prefixItems"])
    return f"list of {type_of(value.get('items', {}), choices)}"


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    if default is None:
        return "null" if "default" in value else ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, Mapping):
        return "see there" if default else "empty"
    return f"`{default}`" if default not in ("", []) else "empty"


def _public(name: str) -> str:
    """The name of a class of the reader's, as the page shows it."""
    return name.removeprefix("_").removesuffix("Document")


def _anchor(heading: str) -> str:
    """The fragment by which GitHub links to a heading."""
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


def _table(heads: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
