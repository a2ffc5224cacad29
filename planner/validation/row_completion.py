"""Settings of measured rows that their frameworks imply, or that stand in another public file.

A row of a table takes, in this order and for empty cells alone: the settings of the shipped table,
whose rows were completed with a citation each; those of the recipe that its source names; and
those that its own figures determine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from parplan.planner.validation.frameworks import RELEASE_TEST_VOCAB
from parplan.planner.validation.row_cells import Row, whole
from parplan.planner.validation.row_recipes import RECIPES
from parplan.planner.validation.step_rows import read_table

SHIPPED = "the shipped table"
RECIPE = "the recipe of the source"
OWN_FIGURES = "its own figures"
# cells of the shipped table that state a setting, not a measurement or a name
_SETTINGS = (
    *("gpus_per_node", "interconnect", "heads", "kv_heads", "head_dim", "ffn_hidden", "gated_ffn"),
    *("vocab", "seq_len", "global_batch", "micro_batch", "dp", "tp", "pp", "vpp", "cp", "ep"),
    *("sequence_parallel", "zero_stage", "recompute", "dtype"),
)
# note of a sequence length that was computed from other figures: that of a recipe goes before
INFERRED_LENGTH = "seq_len inferred"
_WHOLE = 2e-3  # share that a batch derived from a rounded tokens/s may be off a whole number


def completed(row: Row) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the row with the settings that it leaves out, and where they were taken from."""
    complete = dict(row)
    taken = []
    inferred = row["seq_len"] if INFERRED_LENGTH in row["notes"] else ""
    if inferred:
        complete["seq_len"] = ""
    for source, settings in (
        (SHIPPED, _shipped_settings(row["id"])),
        (RECIPE, _recipe_settings(row["id"])),
    ):
        filled = {cell: text for cell, text in settings.items() if text and not complete.get(cell)}
        if filled:
            complete |= filled
            taken.append(source)
    complete["seq_len"] = complete["seq_len"] or inferred
    own = _own_figures(complete)
    if own:
        complete |= own
        taken.append(OWN_FIGURES)
    return complete | _implied(complete), tuple(taken)


def _shipped_settings(row_id: str) -> Mapping[str, str]:
    shipped = _shipped_rows().get(row_id, {})
    return {cell: shipped.get(cell, "") for cell in _SETTINGS}


@functools.cache
def _shipped_rows() -> Mapping[str, Row]:
    return {row["id"]: row for row in read_table()}


def _recipe_settings(row_id: str) -> Mapping[str, str]:
    """Returns the cells of all recipes of a row; of two the first entry goes before."""
    matching = [settings for pattern, settings in RECIPES if re.match(pattern, row_id)]
    return {cell: text for settings in reversed(matching) for cell, text in settings.items()}


def _own_figures(row: Row) -> dict[str, str]:
    """Returns the settings and the step time that other figures of the row give.

    The batch is tokens/s x step time / sequence length where that is a whole number, as it is for
    a step time and a tokens/s that were measured together.
    """
    own = {}
    if row["n_gpus"] and row["tp"] and row["pp"] and not row["dp"]:
        ranks = whole(row, "tp") * whole(row, "pp") * whole(row, "cp", 1)
        if whole(row, "n_gpus") % ranks == 0:
            own["dp"] = str(whole(row, "n_gpus") // ranks)
    if not (row["tokens_per_s_per_gpu"] and row["seq_len"] and row["n_gpus"]):
        return own
    sequences_per_s = float(row["tokens_per_s_per_gpu"]) * whole(row, "n_gpus")
    sequences_per_s /= whole(row, "seq_len")
    if row["step_time_s"] and not row["global_batch"]:
        batch = sequences_per_s * float(row["step_time_s"])
        if round(batch) and abs(batch / round(batch) - 1) < _WHOLE:
            own["global_batch"] = str(round(batch))
    elif row["global_batch"] and not row["step_time_s"] and not row["derived_step_time_s"]:
        own["derived_step_time_s"] = f"{whole(row, 'global_batch') / sequences_per_s:.5g}"
    return own


def _implied(row: Row) -> dict[str, str]:
    """Returns settings that a framework implies.

    Megatron's release tests have the vocabulary of their default tokenizer. A table of two fp8
    recipes has the figure of scaling by tensor first, and that of micro-scaling in parentheses,
    which is a row of its own (docs/performance-summary-archive.md of NVIDIA-NeMo/Megatron-Bridge).
    BigScience's V100 runs shard optimizer states under data parallelism
    (tr3m-1B3-emb-norm-pile.slurm says so for some runs; for the rest it is assumed). vTrain divides
    50,257 by tp without padding (src/model/gpt_model.py of the repository). The head of its
    single-node rows takes 2.3 times as long at tp 1, where the share is odd, as the rows on two
    ranks imply.
    """
    implied = {}
    if "Megatron-LM CI" in row["framework"] and not row["vocab"]:
        implied["vocab"] = str(RELEASE_TEST_VOCAB)
    if row["dtype"].lower() == "fp8-cs/mx" and "-alt-" not in row["id"]:
        implied["dtype"] = "fp8-cs"
    if row["dtype"] == "see notes" and "in parentheses (other quantisation" in row["notes"]:
        implied["dtype"] = "fp8-mx"
    if row.get("layer_pattern") and not row["layers"]:
        implied["layers"] = str(len(row["layer_pattern"].replace("|", "")))
    if row["id"].startswith("bs") and not row["zero_stage"]:
        implied["zero_stage"] = str(int(whole(row, "dp", 1) > 1))
    if row["id"].startswith("vtrain-single-") and row["vocab"] and row["tp"]:
        tp = whole(row, "tp")
        implied |= {"vocab": str(whole(row, "vocab") // tp * tp), "vocab_multiple": "1"}
    return implied
