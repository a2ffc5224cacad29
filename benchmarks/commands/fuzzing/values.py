"""Hostile values of YAML or JSON scalars, of numbers on a command line, and of names."""

from __future__ import annotations

from random import Random

LONG = "x" * 5000
NAMES = (
    "",
    " ",
    "0",
    "-",
    "--",
    "a/b",
    "../..",
    "/",
    "/dev/null",
    "~",
    "nan",
    "None",
    "null",
    "true",
    "\u00e9t\u00e9",
    "\u202e\u2066evil",
    "\U0001f525",
    "\x1b[2J\x1b[31mred",
    "a\tb",
    "a\nb\nerror: not this one",
    "%s%n{0}{x}",
    "[bold]rich[/bold]",
    "[/]",
    "[link=x]",
    "' OR 1",
    "$(id)",
    "a:b",
    "a.b:c",
    ":",
    "os:system",
    LONG,
)
INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    255,
    1000,
    10**6,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**53 + 1,
    10**12,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**18,
    10**19,
    10**30,
    10**308,
)
FLOATS = (
    0.0,
    -0.0,
    1e-300,
    5e-324,
    1e-9,
    0.1,
    0.5,
    0.999999,
    1.5,
    -0.5,
    -1e-9,
    1e18,
    1e300,
    1.7976931348623157e308,
)
# Texts that a parser of YAML or JSON may misread or fail on; written without quotes.
YAML_RAW = (
    ".inf",
    "-.inf",
    ".nan",
    "1e999",
    "0x10",
    "0o17",
    "017",
    "1_5",
    "1_000_000",
    "1:30",
    "1:30:30",
    "2020-01-01",
    "2020-01-01T00:00:00Z",
    "2020-13-45",
    "~",
    "null",
    "yes",
    "off",
    "Y",
    "=",
    "<<",
    "!!int 3",
    "!!int '3'",
    "!!int abc",
    "!!float 3",
    "!!float x",
    "!!binary aGk=",
    "!!binary ???",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!pairs [a: 1]",
    "!!timestamp 2020-01-01",
    "!!timestamp x",
    "!!bool maybe",
    "!!null x",
    "!!python/object/apply:os.system ['true']",
    "!!python/tuple [1, 2]",
    "!unknown x",
    "!!str 5",
    "*undefined",
    "&a [*a]",
    "&a {k: *a}",
    "{a: 1, a: 2}",
    "{? [1, 2] : x}",
    "{? {a: b} : c}",
    "{1: 2}",
    "{null: 1}",
    "{true: 1, 1: 2}",
    "{<<: 3}",
    "{<<: [1]}",
    "{<<: {a: 1}}",
    "9" * 4300,
    "9" * 5000,
    "0." + "9" * 5000,
    "1e" + "9" * 400,
    "-" + "9" * 19,
    "0b" + "1" * 100,
    "'",
    '"',
    "|\n  text",
    ">-\n  text",
    '"\\u0000"',
    '"\\ud800"',
    '"\\x1b[2J"',
    "@x",
    "`x",
    "%x",
    "? x",
    "- x",
    "[",
    "]",
    "{",
    "}",
    ",",
    ": :",
    "[" * 2000,
    "[" * 50000,
)
JSON_RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0",
    "1E400",
    "01",
    "+1",
    ".5",
    "0x10",
    "tru",
    "None",
    "'x'",
    "9" * 4300,
    "9" * 5000,
    "-" + "9" * 19,
    '"\\u0000"',
    '"\\ud800"',
    '"\\x"',
    '{"a": 1, "a": 2}',
    "[1,]",
    "{,}",
    "[" * 2000,
    "[" * 100000,
    '{"a":' * 50000,
    '"unclosed',
    "undefined",
    "//x",
    "1e-400",
)


def scalar(chance: Random) -> object:
    """Return a number, name or small collection that a key seldom needs."""
    pick = chance.random()
    if pick < 0.40:
        return chance.choice(INTEGERS)
    if pick < 0.58:
        return chance.choice(FLOATS)
    if pick < 0.80:
        return chance.choice(NAMES)
    if pick < 0.88:
        return chance.choice((None, True, False, float("nan"), float("inf"), float("-inf")))
    return chance.choice(
        (
            [],
            {},
            [[]],
            [{}],
            {"a": 1},
            [1, 2],
            ["a", 1],
            {"": None},
            [None],
            [0] * 50,
            {"<<": {"a": 1}},
        )
    )


def near(value: object, chance: Random) -> object:
    """Return a value of the same kind, a little or far away."""
    if isinstance(value, bool) or value is None:
        return chance.choice((True, False, None, 0, 1, "true"))
    if isinstance(value, int):
        neighbours = (
            value + 1,
            value - 1,
            value * 2,
            value // 2,
            value * 3,
            -value,
            0,
            value * 10,
            value + 7,
        )
        return chance.choice((*neighbours, chance.choice(INTEGERS)))
    if isinstance(value, float):
        return chance.choice(
            (value * 2, value / 2, -value, 0.0, value * 1e6, value * 1e-6, chance.choice(FLOATS))
        )
    if isinstance(value, str):
        return chance.choice(
            (
                value[:-1],
                value + "x",
                value.upper(),
                value * 3,
                f" {value}",
                "",
                value[::-1],
                chance.choice(NAMES),
            )
        )
    return scalar(chance)
