"""trl: the keys of SFTConfig, and the arguments of `trl sft`.

Names and defaults were read in huggingface/trl at f2cd57710a: trl/trainer/base_config.py and
sft_config.py, and trl/scripts. Its program loads parameters in fp32 (model_config.py: dtype). A
file that names the length max_seq_length is of a release before 0.20, without these defaults.
"""

from __future__ import annotations

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import Argument, Facts, Given, Words, reading
from parplan.planner.export.files.nested_file import read_flag, unpriced
from parplan.planner.export.hugging_face.hf_trainer_arguments import read_dtype
from parplan.planner.export.wrappers.wrapper import TRAINER_BATCH, Wrapper, fixed, passed
from parplan.planner.export.wrappers.wrapper_names import TRL_NAMES
from parplan.profiles.models.spec import Precision

_OLD_LENGTH = "max_seq_length"


def _read_bf16(words: Words, _: Facts) -> Facts:
    return {"precision": Precision.BF16 if read_flag(words) else Precision.FP32}


def _read_fp16(words: Words, facts: Facts) -> Facts:
    """Reads `fp16`, beside which bf16 is off by default."""
    return {"precision": Precision.FP16} if read_flag(words) else {}


def _read_checkpoints(words: Words, _: Facts) -> Facts:
    return {"recompute": Recompute.FULL if read_flag(words) else Recompute.NONE}


_PRICED: tuple[Argument, ...] = (
    reading("bf16", _read_bf16),
    reading("fp16", _read_fp16),
    Argument(
        name="gradient_checkpointing",
        facts=("recompute",),
        write=lambda run: ("true",) if run.recompute is Recompute.FULL else ("false",),
        read=_read_checkpoints,
    ),
    reading("dtype", read_dtype),
    reading("torch_dtype", read_dtype),
    *passed("packing", "packing_strategy", "eval_packing"),
)
_ONE_VALUE = (
    unpriced("padding_free", "false"),
    *(
        fixed(name, "is another kind of training")
        for name in ("use_peft", "activation_offloading", "use_dora", "model_init_kwargs")
    ),
)


def completed(given: tuple[Given, ...]) -> tuple[Given, ...]:
    """Returns the arguments with the defaults of releases that name the length max_seq_length."""
    if not any(each.name == _OLD_LENGTH for each in given):
        return given
    old = (Given(name, ("false",), "trl") for name in ("gradient_checkpointing", "bf16"))
    return (*old, *given)


TRL = Wrapper(
    name="trl",
    source="huggingface/trl at f2cd57710a",
    rows=(*_PRICED, *_ONE_VALUE),
    defaults={
        **TRAINER_BATCH,
        "seq_length": 1024,
        "precision": Precision.BF16,
        "recompute": Recompute.FULL,
    },
    harmless=(TRL_NAMES,),
    marks=frozenset(
        (
            *("dataset_text_field", "completion_only_loss", "assistant_only_loss", "eos_token"),
            *(
                "dataset_train_split",
                "dataset_test_split",
                "packing_strategy",
                "chat_template_path",
            ),
            "dataset_kwargs",
        )
    ),
    programs=(r"(?:^|\s)trl\s+sft\b", r"trl/scripts/sft\.py", r"trl\.scripts\.sft"),
    completed=completed,
)
