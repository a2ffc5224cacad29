"""What measured rows call things, and what their frameworks decide without saying it: data, no
logic.
"""

from __future__ import annotations

import re

from parplan.costmodels.layers.recompute import Recompute
from parplan.profiles.models.spec import Precision

DEVICES = {  # how a gpu cell begins, up to the end of a word -> the cluster file
    "a100-80g-pcie": "a100-80gb-pcie",
    "a100-40g-pcie": "a100-40gb-pcie",
    "a100-80g": "a100-80gb",
    "a100-40g": "a100-40gb",
    "a100-sxm": "a100-80gb",
    "a800-80g": "a800-80gb",
    "h100-80g": "h100-80gb",
    "h100-96g": "h100-96gb-hbm2e",
    "h200-141g": "h200-141gb",
    "gh200-96g": "gh200-96gb",
    "b200": "b200-180gb",
    "gb200": "gb200-186gb",
    "v100-32g": "v100-32gb",
    "v100-16g": "v100-16gb",
    "rtx3090": "rtx3090-24gb",
    "a10g": "a10g-24gb",
    "l4": "l4-24gb",
}
PCIE_IS_ANOTHER = (
    "v100",
    "a100",
    "a800",
    "h100",
    "h200",
)  # devices whose PCIe card is slower than the one of `DEVICES`
STACKS = (  # what a framework cell contains, first match first -> the stack
    (r"Megatron-LM v[12]\.|Megatron-LM \(2020\)", "megatron-lm-2020"),
    (r"Megatron-LM \((\w+ )?2021\)", "megatron-lm-2021"),
    (r"Megatron-LM \((\w+ )?2022\)", "megatron-lm-2022"),
    (r"Megatron-DeepSpeed", "megatron-deepspeed"),
    (r"nanotron \(\w* ?2024\)", "nanotron-2024"),
    (r"torchtitan .*nightly 2024|torchtitan 2024", "torchtitan-2024"),
    (r"nanotron", "nanotron"),
    (r"InternEvo", "internevo"),
    (r"torchtitan|torchtune", "torchtitan"),
    (r"FSDP|Composer|llm-foundry|lit-gpt", "fsdp1"),
    (r"NeMo|Megatron-Bridge|Megatron-Core r0", "nemo"),
    (r"Megatron", "megatron-core"),
)
UNKNOWN_STACK = (
    "torchtitan"  # of a framework that no pattern names; the row says so among its assumed settings
)
NETWORKS = {
    "omnipath": "omni-path",
    "omni-path": "omni-path",
    "roce": "roce",
    "efa": "efa",
}  # named in an interconnect -> the NIC
PRECISIONS = {  # fp16/bf16: BLOOM's early runs, fp16 as their log says
    "bf16": Precision.BF16,
    "bfloat16": Precision.BF16,
    "fp16": Precision.FP16,
    "float16": Precision.FP16,
    "fp16/bf16": Precision.FP16,
}
FP8_DTYPES = ("fp8", "bf16+float8 linear", "bf16+float8 tensorwise", "float8 tensorwise")
RECOMPUTE = {  # a recompute cell -> the levels that blocks take in turn
    "none": (Recompute.NONE,),
    "none []": (Recompute.NONE,),
    "full": (Recompute.FULL,),
    "full uniform 1": (Recompute.FULL,),
    "selective": (Recompute.SELECTIVE,),
    "selective core_attn": (Recompute.SELECTIVE,),
    "selective op": (Recompute.SELECTIVE, Recompute.FULL),
    "selective blocks": (Recompute.FULL,),
    "selective (every other layer)": (Recompute.NONE, Recompute.FULL),
}
# What a framework calls selective. torchtitan: every second product and all that is cheap runs
# again, attention stays; half of the blocks selective and half full take as long and keep a fifth
# fewer bytes. fms-fsdp: one block in k; its published HFU / MFU of 1.35 on A100 and 1.29 on H100
# (4/3 at most) says that nearly all blocks run again.
SELECTIVE_OF = {
    "torchtitan": "selective op",
    "torchtitan-2024": "selective op",
    "fsdp1": "selective blocks",
}
KERNELS = {"sdpa": "flash2", "te": "cudnn"}  # what a note calls a kernel -> the kernel
FOLDS = {
    "vtrain": "hidden",
    "mpt": "hidden",
    "nanotron": "n_gpus",
    "titan": "n_gpus",
    "internevo": "n_gpus",
}
# of GPT recipes before 2022, and Megatron's default, which its release tests keep; BLOOM was
# trained without
DROPOUT = 0.1
NOT_DECODERS = ("bert", "t5", "multimodal", "mimo", "hybrid", "vit")  # how a model cell begins
RELEASE_TEST_VOCAB = (
    50257  # of the tokenizer of Megatron's GPT release tests that name none (GPT2BPETokenizer)
)
FUSED_LOSS_LOGIT_BYTES = (
    10  # Megatron's fused cross entropy keeps fp32 logits beside their gradient
)
# Blocks on the last stage of the vocabulary-parallel fork's `redis` (sail-sg/VocabularyParallelism
# artifact/exp_one_host.csv).
LAST_STAGE_OF_REDIS = {32000: 4, 64000: 3, 128000: 2, 256000: 0}
INTERLEAVING_STACKS = ("megatron-lm-2021", "megatron-lm-2022", "megatron-core", "nemo")
OPEN_MICRO_BATCHES = (1, 2, 4, 8, 16)
# Release tests whose golden values equal those of the un-fused test, and were not refreshed since
# (inferred from the values).
RELEASE_TEST_UNFUSED = re.compile(r"lts-dgxa100_dracooci")
NO_OVERLAP = re.compile(r"overlap=none|overlap features OFF")
