"""Models of the catalog by the names under which they were released, and their vocabularies."""

from __future__ import annotations

import re

from parplan.profiles.models.model_catalog import load_model, model_names
from parplan.profiles.models.spec import ModelSpec

_REWRITTEN = (  # parts of a released name that the catalog writes otherwise or leaves out
    (r"^meta-", ""),
    (r"^llama-3(\.1)?-", "llama3-"),
    (r"^llama-2-", "llama2-"),
    (r"-(hf|base|instruct|v0\.\d)$", ""),
)
# tokenizers whose size their type tells: Llama 2's (arXiv 2307.09288, section 2.2)
_BY_TYPE = {"Llama2Tokenizer": 32000}
# tokenizers that Megatron-LM's release tests name by file: tests/functional_tests/test_cases/gpt/
# gpt3_15b_8t_release of NVIDIA/Megatron-LM at d98e8a64dd; the recipes of NeMo-Framework-Launcher
_BY_FILE = (
    (r"nemotron_2_256k\.model$", 256000),
    (r"llama_tokenizer\.model$", 32000),
)


def released_model(name: str) -> ModelSpec | None:
    """Returns the model of a released name such as `meta-llama/Meta-Llama-3-8B`, None if unknown.

    The length of a sequence and the scale of rotary positions, which have no price, are those of
    the catalog.
    """
    short = name.rpartition("/")[2].lower()
    for pattern, written in _REWRITTEN:
        short = re.sub(pattern, written, short)
    return load_model(short).spec if short in model_names() else None


def vocabulary(tokenizer: str) -> int | None:
    """Returns the tokens of a tokenizer by its type, its file or its released name, else None."""
    if tokenizer in _BY_TYPE:
        return _BY_TYPE[tokenizer]
    by_file = next((size for file, size in _BY_FILE if re.search(file, tokenizer)), None)
    if by_file is not None or "/" not in tokenizer:
        return by_file
    model = released_model(tokenizer)
    return None if model is None else model.vocab_size
