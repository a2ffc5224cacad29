"""Mutations of files: of bytes, of lines, and of the tree of a YAML or JSON document."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import yaml

from benchmarks.commands.fuzzing.values import JSON_RAW, LONG, NAMES, YAML_RAW, near, scalar

_RAW = "Raw{}Text"  # a placeholder in a tree for text that no dumper writes
Path = tuple[Any, ...]
Mutation = Callable[[bytes, Random], bytes]


def flip(content: bytes, chance: Random) -> bytes:
    """Flip some bits."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8)) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def truncate(content: bytes, chance: Random) -> bytes:
    """Return only the beginning, or the end."""
    place = chance.randrange(len(content) + 1)
    return content[:place] if chance.random() < 0.8 else content[place:]


def duplicate(content: bytes, chance: Random) -> bytes:
    """Repeat a part several times."""
    start = chance.randrange(len(content) + 1)
    part = content[start : start + chance.choice((1, 10, 100, 1000))]
    return content[:start] + part * chance.choice((2, 3, 100)) + content[start:]


def insert(content: bytes, chance: Random) -> bytes:
    """Insert bytes that text should not have."""
    odd = chance.choice(
        (
            b"\0",
            b"\x1b[2J",
            b"\xff\xfe",
            b"\xc3\x28",
            b"\xed\xa0\x80",
            b"\xf4\x90\x80\x80",
            b"\x7f",
            b"\t",
            b"\r",
            b"\x85",
            b"\xe2\x80\xa8",
            b"\xef\xbb\xbf",
            b"%",
            b"&a ",
            b"*a",
            b"!!",
            b"\n---\n",
            b"\n...\n",
            b"'",
            b'"',
            b"#",
            b"]",
            b"}",
            b"\x08" * 10,
            b"9" * 50,
        )
    )
    place = chance.randrange(len(content) + 1)
    return content[:place] + odd + content[place:]


def recode(content: bytes, chance: Random) -> bytes:
    """Change encoding, byte order mark or line ends."""
    return chance.choice(
        (
            b"\xef\xbb\xbf" + content,
            content.replace(b"\n", b"\r\n"),
            content.replace(b"\n", b"\r"),
            content.replace(b" ", b"\t"),
            content.decode("utf-8", "replace").encode("utf-16"),
            content.decode("utf-8", "replace").encode("utf-32"),
            content.upper(),
            content.replace(b"\n", b""),
            content[::-1],
        )
    )


def lines(content: bytes, chance: Random) -> bytes:
    """Remove, double or move a line."""
    rows = content.split(b"\n")
    place = chance.randrange(len(rows))
    row = rows.pop(place)
    for _ in range(chance.choice((0, 1, 2))):
        rows.insert(chance.randrange(len(rows) + 1), row)
    return b"\n".join(rows)


def digits(content: bytes, chance: Random) -> bytes:
    """Change one number of the text."""
    places = [place for place, byte in enumerate(content) if 48 <= byte <= 57]
    if not places:
        return content
    start = end = chance.choice(places)
    while end < len(content) and 48 <= content[end] <= 57:
        end += 1
    number = str(near(int(content[start:end][:18]), chance)).encode()
    return content[:start] + number + content[end:]


BYTES: tuple[Mutation, ...] = (flip, truncate, duplicate, insert, recode, lines, digits, digits)


def bytes_mutated(content: bytes, chance: Random) -> bytes:
    """Apply one or two mutations of bytes."""
    for _ in range(chance.choice((1, 1, 2))):
        content = chance.choice(BYTES)(content, chance)
    return content


def paths(tree: Any, here: Path = ()) -> list[Path]:
    """Return every place in a tree, the root first."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        inner = tree.items()
    elif isinstance(tree, list):
        inner = enumerate(tree)
    return [here, *(path for key, value in inner for path in paths(value, (*here, key)))]


def at(tree: Any, path: Path) -> Any:
    """Return the value at a place."""
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Any, path: Path, value: Any) -> Any:
    """Return the tree with `value` at a place."""
    if not path:
        return value
    at(tree, path[:-1])[path[-1]] = value
    return tree


def tree_mutated(tree: Any, chance: Random, raw: list[str], raws: tuple[str, ...]) -> Any:
    """Apply one change to a tree; text that no dumper writes is added to `raw`."""
    known = paths(tree)
    path = chance.choice(known[1:] or known)
    value, holder = at(tree, path), at(tree, path[:-1]) if path else None
    change = chance.choice(
        (
            "delete",
            "rename",
            "hostile",
            "hostile",
            "near",
            "near",
            "near",
            "raw",
            "raw",
            "nest",
            "swap",
            "list",
            "list",
            "extra",
            "graft",
        )
    )
    if change == "delete" and holder is not None:
        del holder[path[-1]]
    elif change == "rename" and isinstance(holder, dict):
        holder[
            chance.choice((f"{path[-1]}s", str(path[-1])[:-1], chance.choice(NAMES), 7, None))
        ] = holder.pop(path[-1])
    elif change == "near":
        tree = put(tree, path, _near_leaf(tree, path, chance))
    elif change == "raw":
        raw.append(chance.choice(raws))
        tree = put(tree, path, _RAW.format(len(raw) - 1))
    elif change == "nest":
        tree = put(tree, path, _nested(value, chance))
    elif change == "swap":
        source = chance.choice(known)
        tree = put(tree, path, copy.deepcopy(at(tree, source)))
    elif change == "list" and isinstance(value, list):
        tree = put(tree, path, _list_changed(value, chance))
    elif change == "extra" and isinstance(value, dict):
        value[chance.choice((LONG, "extra", "", "model", "__class__", "self", "nam\u0435", 3))] = (
            scalar(chance)
        )
    elif change == "graft" and isinstance(value, dict):
        value.update({key: scalar(chance) for key in list(value)[:3]})
    else:
        tree = put(tree, path, scalar(chance))
    return tree


def _near_leaf(tree: Any, path: Path, chance: Random) -> Any:
    value = at(tree, path)
    return scalar(chance) if isinstance(value, dict | list) else near(value, chance)


def _nested(value: Any, chance: Random) -> Any:
    for _ in range(chance.choice((1, 1, 2, 30, 90))):
        value = [value] if chance.random() < 0.5 else {"a": value}
    return value


def _list_changed(value: list[Any], chance: Random) -> list[Any]:
    whole = list(value)
    how = chance.choice(("empty", "double", "drop", "shuffle", "many", "one"))
    if how == "empty" or not whole:
        return []
    if how == "double":
        return whole + copy.deepcopy(whole)
    if how == "drop":
        whole.pop(chance.randrange(len(whole)))
    elif how == "shuffle":
        chance.shuffle(whole)
    elif how == "many":
        return [copy.deepcopy(whole[0]) for _ in range(chance.choice((5, 100, 3000)))]
    return whole[:1] if how == "one" else whole


def _with_raw(text: str, raw: list[str], *, quoted: bool) -> str:
    for number, part in enumerate(raw):
        mark = _RAW.format(number)
        text = text.replace(f'"{mark}"' if quoted else mark, part)
    return text


YAML_WHOLE = (
    "",
    "\n",
    "---\n---\n",
    "---\na: 1\n---\nb: 2\n",
    "null",
    "[]",
    "3",
    "text",
    "[" * 100000,
    "{a: " * 100000,
    "- " * 50000 + "x",
    "? " * 20000,
    "a: &a [x]\n"
    + "".join(
        f"b{n}: &b{n} [{', '.join(['*' + (f'b{n - 1}' if n else 'a')] * 9)}]\n" for n in range(9)
    ),
    "a: &a {k: 1}\n"
    + "".join(
        f"b{n}: &b{n} {{<<: [{', '.join(['*' + (f'b{n - 1}' if n else 'a')] * 9)}]}}\n"
        for n in range(9)
    ),
    "&a [*a]",
    "&a {b: *a}",
    "!!python/object/apply:os.system ['true']",
    "%YAML 9.9\n---\na: 1\n",
    "%TAG ! tag:x,2000:\n---\na: !b c\n",
    "a: 1\na: 2\n",
    "\x00",
    "\ufeff",
    "# only a comment\n",
    "a: |\n" + "  x\n" * 20000,
    "a: " + "x" * 2_000_000,
    "'" * 100001,
    "9" * 100000,
    "\n".join(f"k{n}: {n}" for n in range(50000)),
)
JSON_WHOLE = (
    "",
    "null",
    "[]",
    "3",
    '"text"',
    "{}",
    "[" * 100000,
    '{"a":' * 100000,
    "NaN",
    "{} {}",
    '{"a": 1}\n{"b": 2}',
    "9" * 100000,
    '"' + "x" * 2_000_000 + '"',
    "\ufeff{}",
    '{"\\ud800": 1}',
    "[" + "1," * 200000 + "1]",
    '{"model_type": []}',
    '{"model_type": {}}',
    '{"model_type": 3}',
)


def yaml_mutated(content: bytes, tree: Any, chance: Random) -> bytes:
    """Apply one to three mutations to a YAML file: to its tree, its text or both."""
    how = chance.random()
    if how < 0.05:
        return chance.choice(YAML_WHOLE).encode("utf-8", "surrogatepass")
    if how < 0.25:
        return bytes_mutated(content, chance)
    raw: list[str] = []
    changed = _changed(tree, chance, raw, YAML_RAW)
    text = yaml.dump(
        changed,
        Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper),
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
    )
    made = _with_raw(text, raw, quoted=False).encode("utf-8", "surrogatepass")
    return bytes_mutated(made, chance) if how > 0.95 else made


def json_mutated(content: bytes, tree: Any, chance: Random) -> bytes:
    """Apply one to three mutations to a JSON file: to its tree, its text or both."""
    how = chance.random()
    if how < 0.05:
        return chance.choice(JSON_WHOLE).encode("utf-8", "surrogatepass")
    if how < 0.25:
        return bytes_mutated(content, chance)
    raw: list[str] = []
    text = json.dumps(_changed(tree, chance, raw, JSON_RAW), indent=1, skipkeys=True)
    made = _with_raw(text, raw, quoted=True).encode("utf-8", "surrogatepass")
    return bytes_mutated(made, chance) if how > 0.95 else made


def _changed(tree: Any, chance: Random, raw: list[str], raws: tuple[str, ...]) -> Any:
    changed = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        changed = tree_mutated(changed, chance, raw, raws)
    return changed
