"""The switches of Megatron-Core that hide or save communication inside a stage.

Their conditions were read in NVIDIA/Megatron-LM at d98e8a64dd: `validate_args` of
megatron/training/arguments.py and `TransformerConfig.__post_init__` of
megatron/core/transformer/transformer_config.py.
"""

from __future__ import annotations

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.fields.switches import Switch
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.spec import Precision


def _no_tensor_overlap(settings: Settings) -> str:
    """arguments.py: the overlap of products and collectives is of sequence parallelism alone."""
    if settings.tp > 1 and settings.sequence_parallel:
        return ""
    return "needs --sequence-parallel and a tensor-parallel size above 1"


def _no_flex(settings: Settings) -> str:
    """megatron/core/transformer/moe/token_dispatcher.py: MoEFlexTokenDispatcher."""
    if settings.has_experts and settings.ep * settings.etp > 1:
        return ""
    return "needs experts that several ranks divide"


def _no_exchange_overlap(settings: Settings) -> str:
    """transformer_config.py: overlap_moe_expert_parallel_comm."""
    recomputes = (settings.recompute is Recompute.SELECTIVE and settings.recompute_modules) or ()
    reasons = {
        "needs an expert-parallel size above 1": settings.ep == 1,
        "needs virtual stages beside pipeline stages": (
            settings.pp > 1 and settings.virtual_stages == 1
        ),
        "does not run with --recompute-granularity full": settings.recompute is Recompute.FULL,
        "does not run with moe among --recompute-modules": "moe" in recomputes,
        "needs --bf16 or --fp16": settings.precision is Precision.FP32,
        "runs one layer of multi-token prediction at most": settings.mtp_layers > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _has_user_buffers(settings: Settings, cluster: Cluster) -> bool:
    """Returns whether Transformer Engine runs, which no GPU before Ampere has, inside a node."""
    capability = cluster.device.compute_capability
    return capability is not None and capability >= 8 and settings.tp <= cluster.gpus_per_node


def _has_deep_ep(_: Settings, cluster: Cluster) -> bool:
    """Returns whether DeepEP runs: on Ampere, Hopper, B200 and B300.

    src/megatron/bridge/training/flex_dispatcher_backend.py of NVIDIA-NeMo/Megatron-Bridge at
    067f987df0; Megatron-LM takes the program's word that DeepEP is installed.
    """
    device = cluster.device
    capability = device.compute_capability
    named = device.name.startswith(("b200", "b300"))
    return named or (capability is not None and 8 <= capability < 10)


TENSOR_OVERLAP = Switch(
    name="--tp-comm-overlap",
    fact="tp_overlap",
    of_stack="overlap_tensor_parallel",
    refused=_no_tensor_overlap,
    idle=lambda run: not (run.tp > 1 and run.sequence_parallel),
    runs_on=_has_user_buffers,
    unpriced="Transformer Engine's buffers of gathered tokens",
)
FLEX = Switch(
    name="--moe-token-dispatcher-type flex",
    fact="tokens_once",
    of_stack="sends_tokens_once",
    refused=_no_flex,
    idle=lambda run: run.ep == 1,
    runs_on=_has_deep_ep,
    unpriced="DeepEP's buffers of tokens",
)
EXCHANGE_OVERLAP = Switch(
    name="--overlap-moe-expert-parallel-comm",
    fact="overlap_exchanges",
    of_stack="overlap_exchanges",
    refused=_no_exchange_overlap,
    idle=lambda run: run.ep == 1,
    runs_on=lambda _, __: True,
    unpriced="the activations of one more micro-batch, which runs forward beside another's "
    "backward pass",
)
SWITCHES = (TENSOR_OVERLAP, FLEX, EXCHANGE_OVERLAP)
