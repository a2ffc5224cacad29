"""Names in measured rows, and settings that their frameworks imply: data, no logic."""

from __future__ import annotations

import re

from parplan.costmodels.layers.recompute import Recompute
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import ContextForm

DEVICES = {  # pattern of the start of a gpu cell, up to the end of a word -> the cluster file
    "a100-80g-pcie": "a100-80gb-pcie",
    "a100-40g-pcie": "a100-40gb-pcie",
    "h100-80g-pcie": "h100-80gb-pcie",
    "h100-pcie": "h100-80gb-pcie",
    "h100-94g": "h100-94gb-nvl",
    "h100-nvl": "h100-94gb-nvl",
    "a100-80g": "a100-80gb",
    "a100-40g": "a100-40gb",
    "a100-sxm": "a100-80gb",
    "a800-80g": "a800-80gb",
    "h100-80g": "h100-80gb",
    "h100-96g": "h100-96gb-hbm2e",
    "h800-80g": "h800-80gb",
    "h200-141g": "h200-141gb",
    "gh200-96g": "gh200-96gb",
    "b200": "b200-180gb",
    "gb200": "gb200-186gb",
    "b300": "b300-270gb",
    "gb300": "gb300-279gb",
    "v100-32g": "v100-32gb",
    "v100-16g": "v100-16gb",
    "rtx3090": "rtx3090-24gb",
    "a10g": "a10g-24gb",
    "l4": "l4-24gb",
    "h20(?!-?1)": "h20-96gb",  # there is one of 141 GB
    "l40s": "l40s-48gb",
    "rtx4090": "rtx4090-24gb",
    "rtx-4090": "rtx4090-24gb",
    "rtx5090": "rtx5090-32gb",
    "rtx-5090": "rtx5090-32gb",
    "rtx-a6000": "rtxa6000-48gb",
    "rtxa6000": "rtxa6000-48gb",
    "rtx-pro-6000": "rtxpro6000-96gb",
    "mi250x": "mi250x-64gb",
    "mi300x": "mi300x-192gb",
    "mi325x": "mi325x-256gb",
    "mi355x": "mi355x-288gb",
    "gaudi3": "gaudi3-128gb",
    "gaudi-3": "gaudi3-128gb",
    # by the first word alone, after the names that say more
    "a100": "a100-80gb",
    "a800": "a800-80gb",
    "h100": "h100-80gb",
    "h200": "h200-141gb",
    "h800": "h800-80gb",
    "gh200": "gh200-96gb",
}
MAKERS = ("nvidia", "geforce", "amd", "instinct", "intel", "habana")  # words before a name
# devices whose PCIe card is slower than the one of `DEVICES`
PCIE_IS_ANOTHER = ("v100", "a100", "a800", "h100", "h200", "h800")
STACKS = (  # pattern in a framework cell, first match first -> the stack
    (r"Megatron-LM v[12]\.|Megatron-LM \(2020\)", "megatron-lm-2020"),
    (r"Megatron-LM \((\w+ )?2021\)", "megatron-lm-2021"),
    (r"Megatron-LM \((\w+ )?2022\)", "megatron-lm-2022"),
    (r"Megatron-DeepSpeed", "megatron-deepspeed"),
    (r"nanotron \(\w* ?2024\)", "nanotron-2024"),
    (r"torchtitan .*nightly 2024|torchtitan 2024", "torchtitan-2024"),
    (r"nanotron", "nanotron"),
    (r"InternEvo", "internevo"),
    (r"torchtitan|torchtune|AutoModel", "torchtitan"),  # NeMo AutoModel: FSDP2 of PyTorch
    (r"[Tt]ransformers|Hugging ?Face|PEFT|TRL|[Aa]xolotl|LLaMA-Factory", "huggingface"),
    (r"FSDP|Composer|llm-foundry|lit-gpt", "fsdp1"),
    (r"NeMo.*2022|NeMo.*2023", "megatron-lm-2022"),
    (r"NeMo|Megatron-Bridge|Megatron-Core r0", "nemo"),
    (r"Megatron", "megatron-core"),
)
# behind the framework of a row that `plan import` made: its stack by name
STACK_OF_LOG = "(stack {})"
# the stack of a framework that matches no pattern: modules of PyTorch that nobody compiles; its
# rows have `framework` among their assumed settings
UNKNOWN_STACK = "huggingface"
NETWORKS = {  # name in an interconnect cell -> the NIC
    "omnipath": "omni-path",
    "omni-path": "omni-path",
    "roce": "roce",
    "efa": "efa",
}
NVL72_SEGMENT = 64  # GPUs of one rack that a job of several racks takes (Megatron-Bridge's cards)
PRECISIONS = {  # fp16/bf16: BLOOM's early runs, fp16 as their log says
    "bf16": Precision.BF16,
    "bfloat16": Precision.BF16,
    "fp16": Precision.FP16,
    "float16": Precision.FP16,
    "fp16/bf16": Precision.FP16,
}
PRODUCT_FORMATS = {  # a dtype cell -> the format of the products
    "fp8": ProductFormat.FP8_DELAYED,
    "fp8-cs": ProductFormat.FP8_CURRENT,
    "bf16+float8 linear": ProductFormat.FP8_CURRENT,
    "bf16+float8 tensorwise": ProductFormat.FP8_CURRENT,
    "float8 tensorwise": ProductFormat.FP8_CURRENT,
    "bf16+float8 rowwise": ProductFormat.FP8_ROWWISE,
    "fp8-mx": ProductFormat.MXFP8,
    "fp8_mx": ProductFormat.MXFP8,
    "fp8-cs/mx": ProductFormat.MXFP8,
    "fp8-block": ProductFormat.FP8_BLOCK,
    "mxfp8": ProductFormat.MXFP8,
    "mxfp8_cublas": ProductFormat.MXFP8,
    "mxfp8_cublas_rceil": ProductFormat.MXFP8,
    "nvfp4": ProductFormat.NVFP4,
}
# Megatron-Bridge's recipes of fp8 without a further word scale by the tensor as it is (fp8_cs)
CURRENT_SCALING = re.compile(r"Megatron-Bridge")
# Runs that gather weights in the format of the products: Megatron-Bridge's recipes of every format
# but scales of blocks (067f987df0 src/megatron/bridge/training/mixed_precision.py,
# fp8_param_gather and fp4_param_gather), and runs of torchtitan that say so.
NARROW_WEIGHTS = (("framework", r"Megatron-Bridge"), ("notes", r"float8 all-gather"))
PURE = re.compile(r"bf16 \(?pure|pure bf16")  # states in bf16, without fp32 copies
RECOMPUTE = {  # a recompute cell -> the levels that blocks take in turn
    "none": (Recompute.NONE,),
    "none []": (Recompute.NONE,),
    "full": (Recompute.FULL,),
    "full uniform 1": (Recompute.FULL,),
    "selective": (Recompute.SELECTIVE,),
    "selective op": (Recompute.SELECTIVE, Recompute.FULL),
    "selective blocks": (Recompute.FULL,),
    "selective (every other layer)": (Recompute.NONE, Recompute.FULL),
}
# The recompute level that a framework calls selective. torchtitan recomputes every second product
# and all cheap operators, and saves attention; half of the blocks selective and half full take as
# long and save a fifth fewer bytes. fms-fsdp recomputes one block in k; its published HFU / MFU of
# 1.35 on A100 and 1.29 on H100 (4/3 at most) says that it recomputes nearly all blocks.
SELECTIVE_OF = {
    "torchtitan": "selective op",
    "torchtitan-2024": "selective op",
    "fsdp1": "selective blocks",
}
OPTIMIZERS = (  # pattern in a framework, model or notes cell -> the optimizer
    (r"bnb|bitsandbytes|8-bit (Adam|optimizer)", Optimizer.ADAM_8BIT),
    (r"muon", Optimizer.MUON),
)
KERNELS = {"sdpa": "flash2", "te": "cudnn"}  # name of a kernel in a note -> the kernel
FOLDS = {  # source -> the column that divides its rows into folds
    "vtrain": "hidden",
    "mpt": "hidden",
    "nanotron": "n_gpus",
    "titan": "n_gpus",
    "internevo": "n_gpus",
}
# dropout of GPT recipes before 2022, and Megatron's default, which its release tests use; BLOOM was
# trained without
DROPOUT = 0.1
CONTEXT_FORMS = (  # pattern in an id or in notes -> the form of context parallelism
    (r"a2a_p2p", ContextForm.TWO_LEVEL),
    (r"CP=all-to-all", ContextForm.ALL_TO_ALL),
    (r"CP=all-gather", ContextForm.ALL_GATHER),
)
# Start of the id of runs that reduce gradients in the precision of the weights: the performance
# recipes of Megatron-Bridge (perf_recipes/_common.py of the commit below), except those of Kimi K2.
NARROW_GRADIENTS = re.compile(r"mbridge-(?!.*Kimi)|mbcard-.*pretrain_performance")
FIGURES_DISAGREE = "its own figures disagree"
# Start of the id of runs of a release that was slow by a fault which its publisher names
# (NVIDIA-NeMo/Megatron-Bridge@067f987df0): GPT-OSS of 26.06.01 by cudnn-frontend issue 256
# (docs/performance-summary-archive.md), Moonlight with tensor parallelism since 26.04 by its
# PyTorch image (docs/releases/known-issues.md).
NAMED_FAULTS = re.compile(r"mbridge-26\.06\.01-GPT_OSS|mbridge-moonlight16b-")
# Start of the id of release tests that check their losses alone, so that nobody vouches for their
# times: 12 layers of hidden 512 without `iteration-time` in METRICS (NVIDIA/Megatron-LM d98e8a64dd
# tests/functional_tests/test_cases/gpt/gpt3_weekly_*/model_config.yaml, and the default of
# python_test_utils/test_pretraining_regular_pipeline.py). The other tests of that size have no time
# in the shipped table.
UNCHECKED_TIMES = re.compile(r"mcoreci-gpt-gpt3_weekly_")
# Start of the id of BLOOM's runs before 25 February 2022, when a change of the machine made steps 1
# to 5 % faster, so that their log compares none across it (bigscience-workshop/bigscience@9e64ede
# train/tr11-176B-ml/chronicles-prequel.md, GBS Variations).
BEFORE_A_CHANGE = re.compile(r"bloom-l([4-6]\d\d|7[0-6]\d)-")
# Rows whose figures agree after all: torchtitan of 2024 counts the parameters of the embedding in
# its MFU, 6 x 0.53e9 FLOPs a token for Llama 3 8B, 1.054 of the count without them.
# The FLOPs of packed documents have hardly any attention.
FIGURES_AGREE = re.compile(r"titan-2024-llama3-8b-selective|nemolauncher-.*-sft$")
# column, pattern in its cell (in any case) and reason of the rows that are not priced
REFUSED = (
    ("model", r"grpo", "reinforcement learning, whose step generates text as well"),
    ("dp", r"^0$", "dp is 0"),
    ("model", r"^t5|^vit", "an encoder beside a decoder, or of images"),
    ("model", r"^multimodal|^mimo", "a vision tower"),
    ("model", r"_gdn", "linear attention"),
    ("model", r"_dsa", "sparse attention"),
    ("notes", r"^STALE", FIGURES_DISAGREE),
)
# Pattern in a model cell, in lower case with dashes, and the name of the model in `plan models`.
PUBLISHED_MODELS = (
    (r"deepseek-?v4", "deepseek-v4-flash"),
    (r"deepseek-?v3", "deepseek-v3"),
    (r"deepseek-?v2-lite", "deepseek-v2-lite"),
    (r"deepseek-?v2", "deepseek-v2"),
    (r"kimi-?k2", "kimi-k2"),
    (r"gpt-?oss-120b", "gpt-oss-120b"),
    (r"gpt-?oss-20b", "gpt-oss-20b"),
    (r"qwen3-235b", "qwen3-235b-a22b"),
    (r"qwen3-30b", "qwen3-30b-a3b"),
    (r"qwen3-8b", "qwen3-8b"),
    (r"(qwen3\.\d-\w+)", "qwen3.5 and later"),
    (r"moonlight-16b", "moonlight-16b-a3b"),
    (r"mixtral-8x22b", "mixtral-8x22b"),
    (r"mixtral-8x7b", "mixtral-8x7b"),
    (r"llama-?3\.?1?-405b", "llama3-405b"),
    (r"llama-?3\.?1?-70b", "llama3-70b"),
    (r"llama-?3\.?1?-8b", "llama3-8b"),
    (r"nemotron-h-8b", "nemotron-h-8b"),
    (r"omni", "nemotron 3 omni"),
    (r"nemotron-?3-nano-4b", "nemotron-3-nano-4b"),
    (r"nemotron-?3-nano", "nemotron-3-nano-30b-a3b"),
    (r"nemotron-?3-super", "nemotron-3-super-120b-a12b"),
    (r"nemotron-?3\.5-lightning", "nemotron-3.5-lightning"),
    (r"nemotron-?3", "nemotron 3"),
    (r"glm-?5", "glm-5"),
    (r"gemma-4", "gemma-4"),
)
# vocabulary of GPT2BPETokenizer, the default of Megatron's GPT release tests
RELEASE_TEST_VOCAB = 50257
# Tokens of the fullest rank of experts over the mean, in the fullest of the 50 to 100 steps of a
# release test, whose routing is learned: [fitted] to the peak memory of these tests. Performance
# runs of NVIDIA force a balance.
RELEASE_TEST_IMBALANCE = 1.15
# --wgrad-deferral-limit of the release tests with --defer-embedding-wgrad-compute (Megatron-LM
# d98e8a64dd tests/functional_tests/test_cases/gpt, model_config.yaml of these tests)
DEFERRED_HEAD_GRADIENTS = 2
# Megatron's fused cross entropy holds fp32 logits beside their gradient
FUSED_LOSS_LOGIT_BYTES = 10
# Pattern in the id of a run, first match first, and the bytes of a logit at the peak of its loss.
# torchtune (bd2a0fc7c3 torchtune/modules/loss): plain cross entropy in PyTorch holds the 16-bit
# logits and their gradient, and in fp32 the logits, their log-softmax and the gradients of both;
# compiled it holds the 16-bit ones, and in fp32 the logits, their log-softmax and its gradient; in
# eight chunks (CEWithChunkedOutputLoss) the 16-bit logits, and all of that for one chunk.
LOGIT_BYTES = (
    (r"torchtune-.*-packed", 20),
    (r"torchtune-.*-compile", 14),
    (r"torchtune-", 4),
)
# A loss that torchtitan compiles keeps the 16-bit logits and makes their gradient from these
# (pytorch/torchtitan b5bcd76c66 torchtitan/components/loss.py); until 2025 it compiled none.
COMPILED_LOSS_LOGIT_BYTES = 4
COMPILING_STACK = "torchtitan"
COMPILED = re.compile(r"\bcompile\b(?!=false)")
# nanotron with tp_linear_async_communication (huggingface/nanotron 7bc99232
# src/nanotron/parallel/tensor_parallel/functional.py: _ColumnLinearAsyncCommunication)
ASYNC_TENSOR_PARALLEL = re.compile(r"reduce-scatter mode with async comm")
# Runs without torch.compile: torchtune's first row, to which the second adds it, and torchtitan's,
# those of 2024 on A100 by the recipe of their date (4d88a8a44 train_configs/llama3_8b.toml)
EAGER = re.compile(r"torchtune-.*-packed|titan-.*-eager|titan-2024-")
# Runs of torchtune whose optimizer updates in the backward pass: its techniques add up in this
# order (docs/source/tutorials/memory_optimizations.rst, optimizer_in_bwd).
IN_BACKWARD = re.compile(r"torchtune-.*-(optimizer_in_bwd|activation_offloading|8-bit_AdamW)")
# Blocks on the last stage of the vocabulary-parallel fork's `redis` (sail-sg/VocabularyParallelism
# artifact/exp_one_host.csv).
LAST_STAGE_OF_REDIS = {32000: 4, 64000: 3, 128000: 2, 256000: 0}
# Methods that divide the vocabulary over the ranks of a pipeline, with the micro-batches that the
# first rank holds in addition: a number, and a share of the ranks.
MORE_IN_FLIGHT = {"vocab-1": (2, 0.0), "vocab-2": (1, 0.0), "interlaced": (0, 0.5)}
LAYOUT_STACKS = ("megatron-core", "nemo")  # stages of any lengths
INTERLEAVING_STACKS = ("megatron-lm-2021", "megatron-lm-2022", "megatron-core", "nemo")
OPEN_MICRO_BATCHES = (1, 2, 4, 8, 16)
# Release tests whose golden values equal those of the un-fused test: they were not refreshed since
# (inferred from the values). The core attention of context parallelism is never un-fused.
RELEASE_TEST_UNFUSED = re.compile(r"lts-dgxa100_dracooci|moe-gpt3_.*_resume_.*-lts-dgx_a100")
OFFLOADS = re.compile(r"(^|[;,] )offload\b")  # all activations of all blocks
NO_OVERLAP = re.compile(r"overlap=none|overlap features OFF")
