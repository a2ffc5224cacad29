"""Branches of a script that its own variables decide are followed."""

from __future__ import annotations

import pytest

from parplan.planner.export.files.shell_words import shell_arguments


def words_of(script: str) -> dict[str, tuple[str, ...]]:
    return {each.name: each.words for each in shell_arguments(script, "a.sh")}


@pytest.mark.parametrize(
    ("test", "holds"),
    [
        pytest.param('[ "$FP8" = 1 ]', True, id="equal"),
        pytest.param("[[ $FP8 != 1 ]]", False, id="not-equal"),
        pytest.param("[[ ${CP:-1} -gt 1 ]]", False, id="default-number"),
        pytest.param("[ $FP8 -le 1 ]", True, id="number"),
        pytest.param('[ -n "${WANDB:-}" ]', False, id="unset"),
        pytest.param('[ -z "${WANDB:-}" ]', True, id="empty"),
        pytest.param("! [ $FP8 = 1 ]", False, id="turned"),
        pytest.param("[ ! $FP8 = 2 ]", True, id="turned-inside"),
    ],
)
def test_one_branch_counts(test, holds):
    script = f"FP8=1\nif {test}; then\n  N=2\nelse\n  N=3\nfi\nrun --tp $N\n"

    assert words_of(script) == {"--tp": ("2" if holds else "3",)}


def test_the_first_branch_that_holds_counts_alone():
    script = """
SIZE=8b
if [ $SIZE = 7b ]; then
    LAYERS=32
elif [ $SIZE = 8b ]
then
    LAYERS=36
    if [[ $SIZE == 7b ]]; then
        LAYERS=1
    fi
elif [ $SIZE = 8b ]; then
    LAYERS=40
else
    LAYERS=80
fi
run --num-layers $LAYERS --bf16
"""
    assert words_of(script) == {"--num-layers": ("36",), "--bf16": ()}


def test_a_guarded_line_counts_where_its_test_holds():
    script = (
        "FP8=0\n[ $FP8 = 1 ] && ARGS+=(--fp8-format hybrid)\n[[ $FP8 == 0 ]] && ARGS+=(--bf16)\n"
    )

    assert words_of(script) == {"--bf16": ()}


def test_a_test_that_the_script_does_not_decide_leaves_all_branches():
    script = "if [ -d $DATA ]; then\n  A=(--bf16)\nelse\n  B=(--fp16)\nfi\nrun --tp 2\n"

    assert words_of(script) == {"--bf16": (), "--fp16": (), "--tp": ("2",)}


def test_a_block_on_one_line_counts_or_does_not():
    assert words_of("A=1\nif [ $A = 2 ]; then B=(--bf16); fi\nrun --tp 2\n") == {"--tp": ("2",)}


def test_slurm_says_its_nodes():
    script = "#SBATCH --nodes=16\nrun --nnodes $SLURM_NNODES --tp 2\n"

    assert words_of(script)["--nnodes"] == ("16",)
