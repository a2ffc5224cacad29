"""Layouts of pipeline stages in Megatron-LM's letters, and the way back."""

from __future__ import annotations

import pytest

from parplan.planner.export.megatron.megatron_layouts import layout_blocks, layout_word


@pytest.mark.parametrize(
    ("blocks", "mtp_layers", "word"),
    [
        pytest.param((1,), 0, "EtL", id="one-stage"),
        pytest.param((3, 4, 4, 2), 0, "Et*3|(t*4|)*2ttL", id="repeated-stages"),
        pytest.param((2, 2), 1, "Ett|ttmL", id="further-tokens"),
        pytest.param((0, 2, 2, 0), 0, "E|(tt|)*2L", id="ends-alone"),
    ],
)
def test_a_word_names_the_blocks_of_every_stage(blocks, mtp_layers, word):
    assert layout_word(blocks, mtp_layers) == word
    assert layout_blocks(word) == blocks


def test_commas_and_repeated_letters_are_read_as_megatron_does():
    assert layout_blocks("Et*3|(tt|)*3,t,m,L") == (3, 2, 2, 2, 1)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        pytest.param("Etx|tL", "x is none of E, t, m, L", id="letter"),
        pytest.param("tt|tL", "begins with E", id="no-embedding"),
        pytest.param("Et*9999999999|L", "has more than 20,000 letters|none of E", id="10-digits"),
        pytest.param("Et*99999999|L", "has more than 20,000 letters", id="8-digits"),
        pytest.param("E(t|)*99999999L", "has more than 20,000 letters", id="stages"),
        pytest.param("E(t*99999)*99999|L", "has more than 20,000 letters", id="twice"),
        pytest.param("E" + "(" * 9000 + "t|L", r"\( is none of", id="brackets"),
        pytest.param("Et*\u00b2|L", r"\* is none of", id="superscript"),
        pytest.param("Et|m|L", "apart from the loss", id="further-tokens-apart"),
    ],
)
def test_other_words_are_refused(word, message):
    with pytest.raises(ValueError, match=message):
        layout_blocks(word)
