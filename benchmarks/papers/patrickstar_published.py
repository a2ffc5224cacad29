"""Published figures of PatrickStar and DeepSpeed, and PatrickStar's rules for memory.

Figures: read off the numbers beside the points of doc/mgpu_scalability.png and
doc/one_node_perf_a100.png of github.com/Tencent/PatrickStar (v0.4.3 to v0.4.5, November and
December 2021; Fang et al. 2021, arXiv:2108.05818). TFLOP/s of all GPUs together, counted as 8 FLOPs
a parameter and token (examples/pretrain_demo.py), the embedding included. Batch and chunk size of a
point are not published: its scripts try 4, 8 and 16 sequences a GPU and chunks of 256, 288 and 384
Mi elements, and report the fastest.

Rules: read in patrickstar/core/memtracer/memtracer.py, examples/ps_config.py and
patrickstar/ops/embedding.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parplan.costmodels.chunks.chunk_layout import SizedTensor, block_tensors, first_tensors
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB, MIB
from tests.helpers.chunk_formulas import state_bytes

MEMBERS = {  # members of configs/families/gpt.yaml by the size in the figures
    "1B": "gpt-1b",
    "2B": "gpt-2b",
    "4B": "gpt-4b",
    "6B": "gpt-6b",
    "8B": "gpt-8b",
    "10B": "gpt-10b",
    "12B": "gpt-12b",
    "15B": "gpt-15b",
    "18B": "gpt-18b",
    "20B": "gpt-20b-wide",
    "40B": "gpt-40b",
    "50B": "gpt-50b",
    "60B": "gpt-60b",
    "68B": "gpt-68b",
    "175B": "gpt-175b-s1024",
}
V100 = ("1B", "2B", "4B", "6B", "8B", "10B", "12B", "15B", "18B")
A100 = (
    "6B",
    "10B",
    "15B",
    "20B",
    "30B",
    "40B",
    "50B",
    "60B",
    "68B",
)  # the shape of 30B is in no file of the repository
PATRICKSTAR_V100: Mapping[int, tuple[float, ...]] = {
    1: (54.60, 50.57, 48.39, 46.31, 42.24, 45.69, 33.78),
    2: (107.46, 100.21, 93.91, 103.51, 83.92, 86.54, 75.52),
    4: (221.74, 212.31, 208.49, 232.94, 211.96, 237.25, 224.59),
    8: (444, 425, 426, 482, 467, 494, 482, 465, 419),
}
PATRICKSTAR_A100: Mapping[int, tuple[float, ...]] = {
    1: (114, 118, 113, 93, 57, 56, 67),
    2: (237, 266, 210, 167, 137, 137, 134),
    4: (534, 587, 519, 585, 524, 367, 368, 333),  # 524: its middle digit is covered
    8: (1180, 1218, 1134, 1231, 1132, 1109, 952, 920, 857),
}
DEEPSPEED_A100: Mapping[int, tuple[float, ...]] = {
    1: (83.6, 87.6, 80.7),
    2: (170, 181, 161, 155),
    4: (374, 341, 338, 241),
    8: (728, 728, 773, 865, 578),
}  # 155: covered too
DEEPSPEED_V100_LARGEST = {
    1: "4B",
    2: "6B",
    4: "6B",
    8: "4B",
}  # data parallel; with its model parallelism of 2 or 4, 8B on 8 GPUs
DEEPSPEED_V100_LARGEST_TP = "8B"
BATCHES = (4, 8, 16)
HOST_BYTES = {"v100-32gb": 240 * GIB, "a100-40gb": 1024 * GIB}


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest published model of a system on so many GPUs of a kind.

    label  the name in the figures
    """

    gpu: str
    gpus: int
    label: str


def largest_published() -> tuple[Largest, ...]:
    """Return PatrickStar's largest models by node and GPUs.

    175B on 32 A100 is the README's, which does not call it the largest.
    """
    of_v100 = tuple(
        Largest(gpu="v100-32gb", gpus=gpus, label=V100[len(row) - 1])
        for gpus, row in PATRICKSTAR_V100.items()
    )
    of_a100 = tuple(
        Largest(gpu="a100-40gb", gpus=gpus, label=A100[len(row) - 1])
        for gpus, row in PATRICKSTAR_A100.items()
    )
    return (*of_v100, *of_a100, Largest(gpu="a100-40gb", gpus=32, label="175B"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """PatrickStar's rules for memory.

    gpu_share      usable share of device memory (overall_gpu_mem_ratio): 0.8 in
                   doc/optimization_options.md and in its examples until 10 December 2021 (fd02f3b),
                   0.9 after
    cpu_share      usable share of host memory (overall_cpu_mem_ratio), as `gpu_share`
    cpu_embedding  tables and their states in fp32 on the host, outside of chunks, once for every
                   process (use_cpu_embedding)
    """

    gpu_share: float = 0.8
    cpu_share: float = 0.8
    cpu_embedding: bool = True


EMBEDDING_BYTES = 16  # of one parameter: fp32 table, gradient and two moments
TRIED = (
    *range(88, 313, 32),
    256,
    288,
    384,
)  # Mi elements: CS_SEARCH of examples/run_transformers.sh, its A100 scripts
STEP_ELEMENTS, LARGE_ELEMENTS = 32 * MIB, 256 * MIB


def num_parameters(model: ModelSpec) -> int:
    """Return the number of all parameters; the head's table is the embedding's."""
    return build_graph(model, _STEP, 1).num_parameters


_STEP = TrainingSpec(global_batch_size=1, seq_length=1, stack=NEUTRAL)


def table_elements(model: ModelSpec) -> int:
    """Return the parameters of the tables of tokens and positions."""
    return (model.padded_vocab_size + model.max_seq_length) * model.hidden_size


def tensors_of(model: ModelSpec) -> tuple[SizedTensor, ...]:
    """Return the tensors of one block of one device, undivided."""
    return block_tensors(
        build_graph(model, _STEP, 1).layer_class(LayerKind.BLOCK), Sharding(1, False)
    )


def packed(model: ModelSpec, chunk_elements: int, ranks: int) -> float:
    """Return the utilisation of all blocks' chunks as PatrickStar packs them (EQUATIONS O1).

    No tensor lies in two chunks, `ranks` chunks in a row are a communication group, and the last
    group is filled up.
    """
    block = tuple(tensor.elements for tensor in tensors_of(model))
    groups = -(-len(first_tensors(block, model.num_layers, chunk_elements)) // ranks)
    return model.num_layers * sum(block) / (groups * ranks * chunk_elements)


def searched_size(model: ModelSpec, ranks: int) -> tuple[int, float]:
    """Return PatrickStar's chunk size and its utilisation.

    Of the sizes that its search and its scripts try, it is the one with most utilisation. For
    tensors larger than those, it is a multiple of 32 Mi elements up to twice the largest tensor.
    """
    largest = max(tensor.elements for tensor in tensors_of(model))
    sizes = [size * MIB for size in TRIED if size * MIB >= largest]
    sizes += (
        range(-(-largest // STEP_ELEMENTS) * STEP_ELEMENTS, 2 * largest, STEP_ELEMENTS)
        if largest > LARGE_ELEMENTS
        else ()
    )
    return max(
        ((size, packed(model, size, ranks)) for size in sizes),
        key=lambda candidate: (candidate[1], -candidate[0]),
    )


def activation_bytes(model: ModelSpec, batch: int, seq_length: int = 1024) -> float:
    """Return R of EQUATIONS O3 with full recompute in fp16.

    It is the inputs of all blocks, and one block with its S x S scores (EQUATIONS M3).
    """
    kept = 2 * seq_length * batch * model.hidden_size
    return kept * model.num_layers + seq_length * batch * (
        34 * model.hidden_size + 5 * model.num_heads * seq_length
    )


def states_fit(
    model: ModelSpec,
    cluster: Cluster,
    rules: Rules,
    batch: int,
    utilisation: float,
    chunk_elements: int,
) -> bool:
    """Return True if PatrickStar's rules find room for all states on devices and hosts.

        14 Phi / u <= G (a_g M_gpu - R - K) + nodes (a_c M_host - g 16 E)

    States take 14 bytes a parameter of the blocks / u. G GPUs, g of them a node, E parameters of
    the tables, K two chunks of working set (EQUATIONS O3). delta and gamma are free.
    """
    tables = table_elements(model)
    room = (
        rules.gpu_share * cluster.device.memory_bytes
        - activation_bytes(model, batch)
        - 2 * 2 * chunk_elements
    )
    host = (
        rules.cpu_share * cluster.host_memory_bytes
        - cluster.gpus_per_node * EMBEDDING_BYTES * tables * rules.cpu_embedding
    )
    states = state_bytes(in_parameters=True) * (num_parameters(model) - tables) / utilisation
    return room > 0 and states <= cluster.num_gpus * room + cluster.nodes * host


ESTIMATORS_BUFFERS = 1.5  # additional_buffer_factor


def deepspeed_fits(model: ModelSpec, cluster: Cluster, zero: int) -> bool:
    """Return True if a model fits by DeepSpeed's estimators, with everything on the host.

    The estimators of model states are those of v0.5 (deepspeed/runtime/zero/stage2.py, stage3.py).

    ZeRO 2    host 1.5 max(4 G, 16) Phi                  device 2 Phi         G GPUs of a node: fp32
              gradients of every one
    ZeRO 3    host 1.5 18 Phi                            device 4 bytes of the largest layer
    """
    parameters = num_parameters(model)
    host = max(4 * cluster.num_gpus, 16) if zero == 2 else 18
    device = 2 * parameters if zero == 2 else 4 * model.padded_vocab_size * model.hidden_size
    return (
        ESTIMATORS_BUFFERS * host * parameters <= cluster.host_memory_bytes
        and device <= cluster.device.memory_bytes
    )
