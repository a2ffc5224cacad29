"""Facts of published runs with experts, from the recipes of their release: data, and a look-up.

Megatron-Bridge's tables of performance (mbridge) and its cards (mbcard) leave out how tokens are
exchanged, what is recomputed and what CUDA graphs capture. The recipes of each release state it:
NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs/*/*workload_base_configs.py at v0.2.0
(releases 25.09 and 25.11), v0.3.0 (26.02), v0.4.0 (26.04) and v0.5.0 (26.06), and
src/megatron/bridge/perf_recipes at 067f987df0 (26.08 and the cards): moe_flex_dispatcher_backend
(deepep or hybridep, else all-to-all), moe_a2a_overlap, cuda_graph_impl (full_iteration comes with
Transformer Engine's fused grouped MLP), recompute_modules; and the same at v0.1.0rc4 for CUDA
graphs of 25.09. docs/releases/known-issues.md says that the container of 26.02 lacks DeepEP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parplan.planner.validation.row_cells import Row
from parplan.profiles.stack import Stack

_Facts = Mapping[str, bool | float]
_ONCE: _Facts = {"sends_tokens_once": True}
_OVERLAPPED: _Facts = {"overlap_exchanges": True}
_BOTH: _Facts = {**_ONCE, **_OVERLAPPED}
# pattern in the id and the precision of a row, in lower case, first match first, and the facts
_EXCHANGES: tuple[tuple[str, _Facts], ...] = (
    (r"mbridge-26\.0[68].*(gpt_oss|qwen3|deepseek).*-gb[23]00-\d+-mxfp8", _BOTH),
    (r"mbridge-26\.0[68].*qwen3_30b.*-b300-\d+-mxfp8", _BOTH),
    (r"mbcard.*pretrain_performance-gb[23]00 (mx|fp8)", _BOTH),
    (r"mbcard-qwen3-30b.*performance-h100", _BOTH),
    (r"mbridge-26\.04.*gpt_oss.*-gb200", _BOTH),
    (r"mbridge-26\.02-.*qwen3_30b.*-h100", _OVERLAPPED),  # DeepEP was not in its container
    (r"mbridge-26\.02.*qwen3_30b.*-h100", _BOTH),
    (r"mbridge-25.*deepseek.*-h100", _BOTH),
    (r"mbridge-26\.(04\.01|0[68]).*deepseek.*-b200-\d+-mxfp8", _BOTH),
    (r"(mbridge-26\.0[68].*gpt_oss.*-|mbcard-gpt-oss-120b.*performance-)gb200", _OVERLAPPED),
    (r"mbridge-25.*qwen3_30b.*-h100", _OVERLAPPED),
    (r"qwen3.235b.*-h100", _OVERLAPPED),
    (r"mbridge-26\.02.*qwen3_235b.*-b300", _OVERLAPPED),
    (r"mbridge-25.*qwen3_235b.*-b200", _OVERLAPPED),
    (r"(mbridge-26|mbcard).*deepseek", _ONCE),
    (r"mbridge-25.*deepseek.*-gb", _ONCE),
    (r"qwen3.*-gb[23]00", _ONCE),
    (r"mbridge-26.*qwen3_30b.*-(h100|b300)", _ONCE),
    (r"mbridge-26\.0[468].*qwen3_30b.*-b200", _ONCE),
    (r"mbridge-26\.0[68].*qwen3_235b.*-b300", _ONCE),
    (r"mbridge-26\.04.*gpt_oss.*-b[23]00", _ONCE),
    (r"mbridge-26\.0[68].*gpt_oss.*-b300", _ONCE),
    (r"kimi.*-gb", _ONCE),
    (r"nemotron.3", _ONCE),
)
# one graph a step, with a kernel that adds the biases of experts and runs their activation; what
# they save is in pages (moe_paged_stash, megatron/core/transformer/moe/paged_stash.py)
_WHOLE_STEP: _Facts = {"host_operator_s": 0.0, "fused_experts": True, "stashes_experts": True}
_WHOLE_LAYERS: _Facts = {"host_operator_s": 0.0}
_ROUTERS: _Facts = {"dispatch_launches": 0}  # graphs of routers, and of attention in most
_GRAPHS: tuple[tuple[str, _Facts], ...] = (
    (r"mbridge-26\.0[68].*(gpt_oss|qwen3|deepseek).*-gb[23]00-\d+-mxfp8", _WHOLE_STEP),
    (r"mbridge-26\.0[68].*qwen3_30b.*-b300-\d+-mxfp8", _WHOLE_STEP),
    (r"mbcard.*pretrain_performance-gb[23]00 (mx|fp8)", _WHOLE_STEP),
    (r"mbridge-25\.09.*qwen3_(30b.*-g?b200|235b.*-gb200)", _WHOLE_LAYERS),
    (r"qwen3.30b.*-(g?b[23]00|h100.* bf16)", _ROUTERS),
    (r"qwen3.235b.*-gb", _ROUTERS),
    (r"gpt_oss.*-g?b300", _ROUTERS),
    (r"(deepseek|kimi).*-gb200", _ROUTERS),
    (r"mbridge-25\.11.*deepseek.*-gb300", _ROUTERS),
    (r"mbridge-26\.(04\.01|0[68]).*deepseek.*-(b300|b200-\d+-mxfp8)", _ROUTERS),
    (r"nemotron.3.nano.*h100", {}),  # of mixers alone
    (r"nemotron.3", _ROUTERS),
)
# words in the notes of any row, and their facts
_NOTED: tuple[tuple[str, _Facts], ...] = (
    (r"\bdispatcher=deepep\b", _ONCE),
    (r"\bcuda_graphs=layers\b", _WHOLE_LAYERS),
)
# Rows that recompute nothing, or norms, activations and up-projections alone, whose time is left
# out. Kimi K2 and DeepSeek-V3 on H100 recompute the dense network and shared experts as well.
_NOTHING_RECOMPUTED = re.compile(
    r"(mbridge-\d.*|mbcard-(?=.*performance))(gpt.oss|qwen3|deepseek|kimi)(?!.*-h100)"
)


def with_recipe(row: Row, stack: Stack) -> Stack:
    """Returns the stack with the facts of the row's recipe and of its notes."""
    key = f"{row['id']} {row['dtype']}".lower()
    facts: dict[str, Any] = {}
    for table in (_EXCHANGES, _GRAPHS):
        facts |= next((found for pattern, found in table if re.search(pattern, key)), {})
    for pattern, noted in _NOTED:
        facts |= noted if re.search(pattern, row["notes"]) else {}
    return replace(stack, **facts)


def recomputes_little(row: Row) -> bool:
    """True for a row whose recipe recomputes nothing that takes long."""
    return _NOTHING_RECOMPUTED.match(row["id"].lower()) is not None
