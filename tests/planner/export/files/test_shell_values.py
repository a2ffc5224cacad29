"""Values of a script's variables: the forms, what stays as it stands, and what it costs."""

from __future__ import annotations

import time

import pytest

from parplan.planner.export.files.shell_conditions import holds
from parplan.planner.export.files.shell_values import MAX_WORD, filled
from parplan.planner.export.files.shell_words import shell_arguments, yaml_arguments

VARIABLES = {"A": "4", "B": "2", "N": "x"}


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$A", "4"),
        ("${A}b$B", "4b2"),
        ("${X:-8}", "8"),
        ("${X-8}", "8"),
        ("${A:-8}", "4"),
        ("${X:-}", ""),
        ("${X:-$A}", "4"),
        ("${X:-${Y:-${B}}}", "2"),
        ("$((A*B))", "8"),
        ("$(( $A * (B + 1) ))", "12"),
        ("$((${X:-3}*A))", "12"),
        ("$((1-2-3))", "-4"),
        ("$((-A+9))", "5"),
        ("$((A / 3 * 3 + A % 3))", "4"),
        ("$((A/0))", "$((A/0))"),
        ("$((N))", "$((N))"),
        ("$((99999999999*99999999999))", "$((99999999999*99999999999))"),
        ("$((\u00b2))", "$((\u00b2))"),
        ("${N##*/}", "${N##*/}"),
        ("${A:=8}", "${A:=8}"),
        ("$X ${X} $1 $(nproc) $", "$X ${X} $1 $(nproc) $"),
        ("${A", "${A"),
    ],
)
def test_a_word_has_the_values_of_its_variables(word, value):
    assert filled(word, VARIABLES) == value


def test_variables_that_double_at_each_step_stay_as_they_stand():
    lines = ["a0=xxxxxxxxxx", *(f"a{n}=$a{n - 1}$a{n - 1}" for n in range(1, 60))]
    (given,) = shell_arguments("\n".join([*lines, "run --name $a59 "]), "f")

    assert len(given.words[0]) <= MAX_WORD
    assert given.words[0].startswith("$a")


SPACES = " " * 20_000
HOSTILE = {
    "sums": "run --tp " + "$((" * 10_000,
    "brackets": "run --tp $((" + "(" * 3000 + "1" + ")" * 3000 + "))",
    "signs": "run --tp $((" + "-" * 5000 + "1))",
    "defaults": "run --tp " + "${a:-" * 10_000,
    "spaces-of-a-test": f"[[ ! {SPACES}x ]] && run --tp 8",
    "spaces-of-a-branch": f"if [ x{SPACES}; thenx\n--tp 3",
    "tests": "[ " * 30_000,
    "continued": "\\\n" * 30_000,
    "quotes": "\"'" * 30_000,
    "yaml": f"--tp: 8{SPACES}b",
    "empty-lines": "\n" * 30_000,
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_line_costs_its_length_whatever_it_is(text):
    started_s = time.process_time()

    shell_arguments(HOSTILE[text], "f")
    yaml_arguments(HOSTILE[text], "f")
    assert time.process_time() - started_s < 5  # half a second here


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("[ $A -eq 4 ]", True),
        ("[[ $A -gt 4 ]]", False),
        ("! [ $A -eq 4 ]", False),
        ("[ ! -z $A ]", True),
        ("! [ ! -z $A ]", False),
        ("[ \u00b2 -eq 2 ]", None),
        (f"[ {'9' * 5000} -gt 1 ]", None),
        ("[ $X = 1 ]", None),
        ("[$A -eq 4]", None),
        ("[ $A -eq 4", None),
        ("test -z x", None),
        ("[ 'a ]", None),
    ],
)
def test_a_test_of_words_and_numbers_is_decided(test, expected):
    assert holds(test, lambda word: filled(word, VARIABLES)) is expected
