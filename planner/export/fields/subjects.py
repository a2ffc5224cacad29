"""The subjects by which a setting changes time or memory, read from the words of its name.

Every launcher and wrapper has names of its own for the same few subjects. A setting that a reader
does not know is an error where its name touches one of them: it may change the step, and it has no
price. The words are those that launchers write, in any spelling: dashes, dots, underscores, capital
letters, and several words in one.
"""

from __future__ import annotations

import re
from enum import StrEnum

from parplan.planner.export.fields.arguments import Words


class Subject(StrEnum):
    """A part of a training that a setting may be about."""

    PARALLELISM = "parallelism"
    RECOMPUTE = "recompute"
    PRECISION = "precision"
    OPTIMIZER = "the optimizer"
    ADAPTERS = "adapters"
    FREEZING = "frozen parameters"
    PACKING = "packing"
    OFFLOAD = "offload"
    BATCH = "batch and sequence"
    MODEL = "further parts of the model"


# for each subject: whole words of a name, and parts of a name that is written without separators
_WORDS: tuple[tuple[Subject, str, str], ...] = (
    (
        Subject.ADAPTERS,
        r"[qxr]?lora\w*|[dv]era|dora|loha|lokr|oft|boft|ia3|pissa|tuner|tuners|reft",
        r"adapter|peft|finetuningtype|traintype|trainingtype|prefixtuning|prompttuning|llamapro"
        r"|lorarank|loraalpha|uselora",
    ),
    (
        Subject.FREEZING,
        r"trainable|untrainable|froze|frozen|tune",
        r"freez|frozen|trainonly|onlytrain|modulestosave|linearprobe|requiresgrad",
    ),
    (
        Subject.OFFLOAD,
        r"cpu|nvme|host|disk|swap|swapped|uvm|zenflow|superoffload",
        r"offload|cpuadam|pagedadam|unifiedmemory|pinmemory",
    ),
    (
        Subject.RECOMPUTE,
        r"ckpts?|remat|remats|rematerial\w*|ac|activations?|checkpoint\w*",
        r"recomput|activationcheckpoint|gradientcheckpoint|checkpointing|checkpointactivation"
        r"|activationmemory|savedactivation|rematerial|gradckpt|memorybudget",
    ),
    (
        Subject.PACKING,
        r"packs?|packed|packing|unpacked|varlen|binpack\w*|dynamic",
        r"samplepack|neatpack|sequencepack|paddingfree|variableseq|variablelength|groupbylength"
        r"|multipack|resetattentionmask|resetpositionids|documentmask|crossdocument|lengthgroup",
    ),
    (
        Subject.OPTIMIZER,
        r"optims?|adam\w*|adafactor|adagrad|adadelta|lamb|lars|lion\w*|sgd|muon|shampoo|soap|galore|"
        r"badam|apollo|lomo|adalomo|sophia|ema|moments?|momentum|master|grokadamw|schedulefree",
        r"optimi[sz]er|galore|badam|apollo|adalomo|adamw|muon|masterweight|expavg|weightaverag",
    ),
    (
        Subject.PRECISION,
        r"[bt]?f(loat|p)?(4|8|16|32|64)\w*|u?int(2|3|4|8|16)\w*|nf4|mx\w*fp\w*|nvfp4|half|"
        r"amp|o[0-3]|dtypes?|autocast|bits?|[248]bit|bnb|hqq|aqlm|gptq|awq|eetq|qat|float\d*\w*",
        r"precision|quanti[sz]|bfloat|float8|float16|fp8|fp16|bf16|fp32|mxfp|nvfp|4bit|8bit"
        r"|autocast|loadin[48]bit|torchao",
    ),
    (
        Subject.PARALLELISM,
        r"[tpcesd]p|etp|vpp?|vp|hsdp|f?sdp\d?|fsdp\d?|ddp|zero\d?|usp|tpsp|cpsize|mesh|degrees?|deg|"
        r"stages?|virtual|ring|ulysses|deepspeed|chunks?|replicas?|sp\d|mp|domino|dualpipe\w*",
        r"parallel|pipeline|pipe|shard|replicat|ulysses|ringattn|ringattention|megatronfsdp|hsdp"
        r"|contextattention|tensormodel|expertmodel|deepep|hybridep|allgather|reducescatter"
        r"|virtualstage|worldsize",
    ),
    (
        Subject.BATCH,
        r"batch\w*|microbatch\w*|bsz|mbs|gbs|gas|accum\w*|seqlen\w*|rampup|cutoff|seq|ctx|contexts?",
        r"batchsize|microbatch|gradientaccumul|accumulationsteps|accumulategrad|seqlen|sequencelen"
        r"|maxlength|contextlen|modelmaxlength|tokensper|sequencelength",
    ),
    (
        Subject.MODEL,
        r"vision|visual|images?|img|audio|video|vit|tower|towers|projector|mamba|ssm|hybrid|retro|"
        r"heterogeneous|dit|diffusion|teacher|draft|eagle\w*|medusa|reward|critic|distill\w*|hyper|mhc",
        r"refmodel|referencemodel|rewardmodel|distillation|speculat|linearattention|mixtureofdepth",
    ),
)
_PATTERNS = tuple(
    (subject, re.compile(rf"(?:{words})\Z"), re.compile(parts)) for subject, words, parts in _WORDS
)


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split())


# words of a name that is about the files of a run, its lines or its evaluation
_BESIDE_A_STEP = _split(
    "eval evals evaluation val valid validation test tests log logs logger logging save saves "
    "saving wandb tensorboard swanlab mlflow report hub push infer inference generation "
    "generate vllm sglang rollout"
)
# words beside `checkpoint` in a name that is about the files of a training state
_OF_FILES = _split(
    "load loading resume dir directory path folder format interval storage async dist file steps "
    "iteration args step freq frequency keep latest last name policy convert every restore "
    "enable strict pretrained from to id sync export"
)
_TRAINED = "modulestosave"  # which adapters train beside them
_OFF = frozenset(("false", "null", "none", "no", "off", "0", "0.0", "", "[]", "{}", "disabled"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[A-Z]+")
_SIZES = ("size", "sizes", "degree", "deg")
_AXES = ("tp", "pp", "cp", "ep", "sp", "dp", "etp", "vpp")


def words_of(name: str) -> tuple[str, ...]:
    """Returns the words of a name in small letters, such as `pure bf16` of `--pure_bf16`."""
    return tuple(word.lower() for word in _WORD.findall(name))


def subject_of(name: str) -> Subject | None:
    """Returns the subject that the name of a setting touches, None where it touches none."""
    words = words_of(name)
    if not _BESIDE_A_STEP.isdisjoint(words) and _TRAINED not in "".join(words):
        return None
    for subject, whole, parts in _PATTERNS:
        of_files = subject is Subject.RECOMPUTE and _is_of_files(words)
        if not of_files and _touches(words, whole, parts):
            return subject
    return None


def _touches(words: tuple[str, ...], whole: re.Pattern[str], parts: re.Pattern[str]) -> bool:
    """True if a word matches, if one has a part inside, or if a part begins at one of them."""
    return any(
        whole.match(word) or parts.search(word) or parts.match("".join(words[index:]))
        for index, word in enumerate(words)
    )


def _is_of_files(words: tuple[str, ...]) -> bool:
    """True if the checkpoint in a name is a file of the training state."""
    checkpoint = any(word in ("checkpoint", "checkpoints", "ckpt", "ckpts") for word in words)
    return checkpoint and not _OF_FILES.isdisjoint(words)


def is_off(name: str, words: Words) -> bool:
    """True if the words of a setting leave its subject alone: `false`, `null`, 0, a degree of 1."""
    if not words:
        return False
    said = {word.strip("'\"").lower() for word in words}
    if said <= _OFF:
        return True
    last = words_of(name)[-1:]
    return (
        said == {"1"} and subject_of(name) is Subject.PARALLELISM and last[0] in (*_SIZES, *_AXES)
    )
