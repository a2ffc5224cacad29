"""One reader reads every file from outside: the values it takes, its refusals and its cost."""

import json
import os
import re
import socket
import zlib
from pathlib import Path

import pytest
import yaml

from parplan.commands.requests.layouts import action_rows
from parplan.executor.checkpoint.folder import read_document
from parplan.executor.data.tokens import read_sidecar
from parplan.planner.plan import plan_file
from parplan.planner.runs import run_file as runs
from parplan.profiles.documents.reader import (
    MAX_BYTES,
    MAX_DEPTH,
    parse_json,
    parse_yaml,
    read_json,
    read_text,
    read_yaml,
)
from parplan.profiles.documents.schema import parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines import user_profile as own
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack
from parplan.profiles.models.model_catalog import load_config, load_family, load_model
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.profiler.communication import comm_file, nccl_tests
from parplan.profiles.profiler.journal import open_journal

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(
    [
        *ROOT.glob("configs/*/*.yaml"),
        *ROOT.glob("profiles/data/*.yaml"),
        *ROOT.glob("examples/**/*.yaml"),
    ]
)


def bomb(line: str) -> str:
    """Ten levels, each of ten aliases to the one before."""
    return "a0: &a0 {x: 1}\n" + "".join(
        line.format(i, ", ".join([f"*a{i - 1}"] * 10)) for i in range(1, 11)
    )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_what_is_shipped_reads_as_pyyaml_reads_it(path):
    expected = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)

    assert repr(read_yaml(path)) == repr(expected)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2020-01-01", "2020-01-01"),
        ("2020-01-01 10:00:00", "2020-01-01 10:00:00"),
        ("1e5", "1e5"),
        ("1.0e+20", 1e20),
        ("1.0e-05", 1e-5),
        (".5", 0.5),
        ("-3", -3),
        ("+7", 7),
        ("0", 0),
        ("-0.0", -0.0),
        ("~", None),
        ("", None),
        ("null", None),
        ("yes", True),
        ("False", False),
        ("'0x10'", "0x10"),
        ('"1_5"', "1_5"),
        ("'yes'", "yes"),
        ("08", "08"),
        ("1.2.3", "1.2.3"),
        ("=", "="),
        ("123456789012345678", 123456789012345678),
        ("|\n two\n lines\n", "two\nlines\n"),
        ("{}", {}),
        ("[]", []),
        ("{1: a, yes: b, ~: c}", {"1": "a", "yes": "b", "~": "c"}),
    ],
)
def test_a_scalar_has_the_type_that_json_has_for_it(text, value):
    scalar = parse_yaml(text, "f")

    assert scalar == value
    assert type(scalar) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        1e-5,
        1e20,
        -1.5e300,
        0.1,
        5e-324,
        10**17,
        "1e5",
        "2020-01-01",
        "0x10",
        "1_5",
        "1:30",
        "yes",
        "",
        "a: b",
        "\xe9",
    ],
)
def test_what_pyyaml_writes_reads_back(value):
    assert parse_yaml(yaml.safe_dump({"key": [value]}, allow_unicode=True), "f") == {"key": [value]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: 1\nb: 0x10", ":2: 0x10 is no number as JSON has them", id="hexadecimal"),
        pytest.param("a: 0_5", ":1: 0_5 is no number", id="octal-underscore"),
        pytest.param("a: 017", ":1: 017 is no number", id="octal"),
        pytest.param("a: 0b11", ":1: 0b11 is no number", id="binary"),
        pytest.param("a: 1:30", ":1: 1:30 is no number", id="sexagesimal"),
        pytest.param("a: -.inf", ":1: -.inf is no number", id="infinite"),
        pytest.param("a: .nan", ":1: .nan is no number", id="nan"),
        pytest.param("a: 1.0e+999", r":1: 1\.0e\+999 is beyond the range of floats", id="overflow"),
        pytest.param(
            f"a: {'9' * 19}",
            ":1: 9999999999999999999 has 19 digits, an integer has at most 18",
            id="19-digits",
        ),
        pytest.param(f"\na: {'9' * 4301}", r":2: 9+\.\.\. has 4301 digits", id="4301-digits"),
        pytest.param(
            "a: !!int 5", ":1: the tag tag:yaml.org,2002:int, a file has only", id="int-tag"
        ),
        pytest.param("a: !!binary aGk=", ":1: the tag tag:yaml.org,2002:binary", id="binary-tag"),
        pytest.param("a: !!set {x}", ":1: the tag tag:yaml.org,2002:set", id="set-tag"),
        pytest.param(
            "!!python/object:os.system {}",
            ":1: the tag tag:yaml.org,2002:python/object:os.system",
            id="object-tag",
        ),
        pytest.param("a: ! 5", ":1: the tag !, a", id="no-tag"),
        pytest.param("a: 1\nb: 2\na: 3", ":3: the key a is there twice", id="duplicate"),
        pytest.param("? [a]\n: 1", ":1: a key that is no text", id="a-list-as-key"),
        pytest.param(
            "a: &a [*a]", r":1: the alias \*a stands inside what it stands for", id="recursive"
        ),
        pytest.param("a: *b", r":1: the alias \*b stands for nothing before it", id="no-anchor"),
        pytest.param(
            "<<: 5", ":1: << takes a mapping, or a list of mappings", id="merge-of-a-number"
        ),
        pytest.param("a\n---\nb", ":2: a second document", id="two-documents"),
        pytest.param("%TAG ! x\n---\na: 1", ":1: a directive", id="directive"),
        pytest.param("a: [1\nb: {", ":2: not YAML: ", id="broken"),
        pytest.param("[" * 300_000, f":1: nested more than {MAX_DEPTH} deep", id="deep-flow"),
        pytest.param("- " * 300_000, f":1: nested more than {MAX_DEPTH} deep", id="deep-blocks"),
        pytest.param(
            "{a: " * 300_000, f":1: nested more than {MAX_DEPTH} deep", id="deep-mappings"
        ),
        pytest.param(
            "a: &a " + "[" * 40 + "]" * 40 + "\nb: " + "[" * 40 + "*a" + "]" * 40,
            ":2: nested more than",
            id="deep-through-an-alias",
        ),
        pytest.param(
            bomb("a{0}: &a{0} [{1}]\n"), ":7: more than 2,000,000 values", id="alias-bomb"
        ),
        pytest.param(
            bomb("a{0}: &a{0} {{<<: [{1}]}}\n"), ":7: more than 2,000,000 values", id="merge-bomb"
        ),
    ],
)
def test_more_than_json_has_is_refused_with_the_line(text, message):
    with pytest.raises(ConfigError, match="^f" + message) as caught:
        parse_yaml(text, "f")

    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "value"), [("500_000", 500000), ("-1_000_000", -1000000), ("1_000.5", 1000.5)]
)
def test_underscores_between_digits_are_read_as_in_yaml_1_1(text, value):
    assert parse_yaml(f"a: {text}", "f") == {"a": value} == yaml.safe_load(f"a: {text}")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n",
        "a: &a {x: 1}\nb: &b {x: 2, z: 3}\nc: {w: 0, <<: [*a, *b]}\n",
        "a: &a [1, 2]\nb: *a\n",
        "a: &a 5\nb: [*a, *a]\n",
        "'<<': 1\n",
    ],
)
def test_aliases_and_merge_keys_are_what_pyyaml_makes_of_them(text):
    assert repr(parse_yaml(text, "f")) == repr(yaml.load(text, Loader=yaml.SafeLoader))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param('{"a": 1,\n"b": NaN}', ":2: not JSON: NaN is no number of JSON", id="nan"),
        pytest.param("[-Infinity]", ":1: not JSON: -Infinity", id="infinity"),
        pytest.param("[1e999]", ":1: 1e999 is beyond the range of floats", id="overflow"),
        pytest.param(
            f"[\n-{'9' * 4301}]",
            ":2: -9+... has 4301 digits, an integer has at most 18",
            id="4301-digits",
        ),
        pytest.param('{"a": 1, "a": 2}', ": the key a is there twice", id="duplicate"),
        pytest.param(
            "[" * 300_000, f": nested more than {MAX_DEPTH} deep", id="deeper-than-the-stack"
        ),
        pytest.param("[" * 65 + "]" * 65, f": nested more than {MAX_DEPTH} deep", id="deep"),
        pytest.param("[" + "0," * 2_000_000 + "0]", ": more than 2,000,000 values", id="many"),
        pytest.param('["\\ud800"]', ": half a character", id="surrogate"),
        pytest.param("{'a': 1}", ":1: not JSON: ", id="broken"),
    ],
)
def test_more_than_json_has_is_refused_in_json_too(text, message):
    with pytest.raises(ConfigError, match="^f" + message) as caught:
        parse_json(text, "f")

    assert caught.value.hint


def test_json_reads_as_it_did():
    text = '{"a": [1, -2.5e-3, true, null, "\\ud83d\\ude00"], "b": {"c": 1E5}}'

    assert parse_json(text, "f") == json.loads(text)


READERS = {
    "model": lambda path: load_model(str(path)),
    "cluster": lambda path: load_cluster(str(path)),
    "stack": lambda path: load_stack(str(path)),
    "family": lambda path: load_family(str(path)),
    "plan": plan_file.read_plan,
    "profile": own.read_profile,
    "communication": comm_file.read_comm_file,
    "run": runs.read_run,
    "nccl-tests": lambda path: nccl_tests.read_nccl_tests([path]),
    "schedule": action_rows,
    "checkpoint": lambda path: read_document(path.parent),
    "tokens": lambda path: read_sidecar(path.with_name("tokens.bin")),
}
NAMES = {"checkpoint": "checkpoint.json", "tokens": "tokens.bin.json"}


def too_large(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_BYTES + 1)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("made", "message"),
    [
        pytest.param(os.mkfifo, "a pipe, not a regular file", id="pipe"),
        pytest.param(
            os.mkdir, "a folder, not a regular file|config.json: No such file", id="folder"
        ),
        pytest.param(
            lambda path: os.symlink("/dev/zero", path), "a device, not a regular file", id="device"
        ),
        pytest.param(
            lambda path: os.symlink(path, path), "Too many levels of symbolic links", id="loop"
        ),
        pytest.param(too_large, "bytes, at most 67,108,864 are read", id="too-large"),
        pytest.param(
            lambda path: path.write_bytes(b"a: 1\n\xff"), ":2: not UTF-8 text", id="not-utf-8"
        ),
        pytest.param(lambda path: path.write_bytes(b"a: 1\n\n\0"), ":3: a NUL byte", id="nul"),
        pytest.param(
            lambda path: path.write_bytes("a: 1".encode("utf-16")), "it is UTF-16", id="utf-16"
        ),
    ],
)
def test_every_reader_says_what_is_wrong_with_a_file(kind, made, message, tmp_path):
    if kind == "nccl-tests" and made(tmp_path / "tried") is not None:
        return  # a log with a broken byte in it is read
    path = tmp_path / NAMES.get(kind, "file.yaml")
    made(path)

    with pytest.raises((ConfigError, ValueError), match=message) as caught:
        READERS[kind](path)

    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "kind", ["model", "cluster", "stack", "family", "plan", "profile", "communication"]
)
@pytest.mark.parametrize(
    "text",
    [
        "a: 0x10",
        "a: !!int 5",
        "- " * 100_000,
        bomb("a{0}: &a{0} [{1}]\n"),
        f"a: {'9' * 4301}",
        "a: 1\na: 2",
    ],
)
def test_every_reader_of_yaml_is_the_bounded_one(kind, text, tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(text)

    with pytest.raises(
        ConfigError, match=r"file\.yaml:\d+: (0x10|the tag|nested|more than|9+|the key)"
    ):
        READERS[kind](path)


@pytest.mark.parametrize(
    "read",
    [lambda path: load_config(str(path)), runs.read_run, lambda path: read_document(path.parent)],
)
@pytest.mark.parametrize("text", ["[" * 100_000, "[NaN]", f"[{'9' * 4301}]", '{"a": 1, "a": 2}'])
def test_every_reader_of_json_is_the_bounded_one(read, text, tmp_path):
    for name in ("config.json", "checkpoint.json"):
        (tmp_path / name).write_text(text)

    with pytest.raises((ConfigError, ValueError), match=r"json(:1)?: (nested|not JSON|9+|the key)"):
        read(tmp_path / "config.json")


@pytest.mark.parametrize(
    "name", ["x" * 5000, "a/" * 3000 + "x.yaml", "nul\0.yaml", "x" * 300 + ".yaml"]
)
@pytest.mark.parametrize("load", [load_model, load_cluster, load_stack, load_family])
def test_a_name_that_no_file_can_have_is_one_error(load, name):
    with pytest.raises(ConfigError, match=r"unknown|File name too long|null byte"):
        load(name)


def test_a_socket_is_no_file(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
        with pytest.raises(ConfigError, match="cannot read"):
            read_text(tmp_path / "socket")


def test_a_byte_order_mark_of_utf_8_is_passed_over(tmp_path):
    (tmp_path / "f").write_bytes(b'\xef\xbb\xbf{"a": 1}')

    assert read_yaml(tmp_path / "f") == read_json(tmp_path / "f") == {"a": 1}


def test_a_journal_of_another_hand_is_refused(tmp_path):
    body = b'{"journal_version":' + b"[" * 100_000
    (tmp_path / "j").write_bytes(body + f"\t{zlib.crc32(body):08x}\n".encode())

    with pytest.raises(ConfigError, match="is not a journal of plan profile"):
        open_journal(tmp_path / "j", {})


def test_a_document_of_wrong_values_is_refused_at_once():
    with pytest.raises(ConfigError, match="f: 5,000 of its values are not what they must be"):
        parse(ModelSpec, {f"key{i}": 0 for i in range(5000 - 8)}, "f")


def test_a_long_value_is_shown_by_its_beginning():
    with pytest.raises(ConfigError) as caught:
        parse(ModelSpec, {"name": "m", "num_layers": "x" * 10_000}, "f")

    assert re.search(r"found 'x+\.\.\.$", caught.value.message)
    assert len(caught.value.message) < 300
