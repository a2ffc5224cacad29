"""torchtitan's options under the names that its releases had, and what its configurations ship.

Read in the releases 0.1.0, 0.2.2 and 0.3.0, and in pytorch/torchtitan at b5bcd76c66, which counts
tokens in place of sequences. Until 0.2 a TOML file had the options, which `--job.config_file` or
the variable CONFIG_FILE names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import Facts, Given

# releases with TOML files (JobConfig): every second block recomputes unless a file says otherwise
JOB_DEFAULTS: Facts = {
    "seq_length": 2048,
    "local": 8,
    "recompute": Recompute.SELECTIVE,
    "every": 2,
}
CHECKPOINT = "activation_checkpoint"
_P, _T = "--parallelism.", "--training."
# names of releases before 0.3, and the ones that the table has
_FORMER = {
    f"{_T}batch_size": f"{_T}local_batch_size",
    f"{_T}data_parallel_degree": f"{_P}data_parallel_shard_degree",
    f"{_T}data_parallel_shard_degree": f"{_P}data_parallel_shard_degree",
    f"{_T}data_parallel_replicate_degree": f"{_P}data_parallel_replicate_degree",
    f"{_T}tensor_parallel_degree": f"{_P}tensor_parallel_degree",
    f"{_T}enable_loss_parallel": f"{_P}enable_loss_parallel",
    f"{_T}compile": "--compile.enable",
    "--experimental.pipeline_parallel_degree": f"{_P}pipeline_parallel_degree",
    "--experimental.pipeline_parallel_schedule": f"{_P}pipeline_parallel_schedule",
    "--experimental.pipeline_parallel_microbatches": f"{_P}num_pp_microbatches",
    "--experimental.context_parallel_degree": f"{_P}context_parallel_degree",
    "--experimental.enable_async_tensor_parallel": "--compile.enable_async_tensor_parallel",
    f"{_P}enable_async_tensor_parallel": "--compile.enable_async_tensor_parallel",
    f"{_P}pipeline_parallel_microbatches": f"{_P}num_pp_microbatches",
    f"--{CHECKPOINT}.mode": CHECKPOINT,
}
_MODEL = ("--model.name", "--model.flavor")
_SWITCHES = (
    "--compile.enable",
    "--compile.enable_async_tensor_parallel",
    f"{_T}enable_cpu_offload",
    f"{_T}disable_cuda_graphs",
    f"{_P}enable_fsdp_symm_mem",
    f"{_P}no-enable_sequence_parallel",
    "--optimizer.early_step_in_backward",
)
_SEQUENCES = f"{_P}enable_sequence_parallel"
_ON, _OFF = ("true",), ("false",)
_EMPTY = ("", "none", "[]")  # of keys that releases have with nothing in them


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """The settings of a named configuration (torchtitan/models/<module>/config_registry.py)."""

    seq_length: int
    sequences: int
    recompute: Recompute
    tp: int = 1

    @property
    def facts(self) -> Facts:
        return {
            "seq_length": self.seq_length,
            "recompute": self.recompute,
            "local": self.sequences,
            "tp": self.tp,
        }


_SELECTIVE, _FULL = Recompute.SELECTIVE, Recompute.FULL
SHIPPED = {
    "llama3_8b": Shipped(seq_length=8192, sequences=1, recompute=_SELECTIVE),
    "llama3_70b": Shipped(seq_length=8192, sequences=8, recompute=_FULL, tp=8),
    "qwen3_14b": Shipped(seq_length=4096, sequences=4, recompute=_FULL),
    "qwen3_32b": Shipped(seq_length=4096, sequences=2, recompute=_FULL),
    "qwen3_30b_a3b": Shipped(seq_length=4096, sequences=2, recompute=_FULL),
    "gpt_oss_20b": Shipped(seq_length=8192, sequences=1, recompute=_FULL),
    "gpt_oss_120b": Shipped(seq_length=8192, sequences=1, recompute=_FULL),
}


def former(given: Iterable[Given]) -> tuple[Given, ...]:
    """Returns options under the names of the table, with switches as its command line has them."""
    found = [_renamed(each) for each in given]
    named = {each.name: each for each in found if each.words}
    if all(name in named for name in _MODEL):
        module, flavor = (named[name].words[0] for name in _MODEL)
        name = f"{module}_{flavor.lower().replace('-', '_')}"
        where = named[_MODEL[0]].where
        said = (Given("--module", (module,), where), Given("--flavor", (name,), where))
        found = [each for each in found if each.name not in _MODEL] + list(said)
    return tuple(each for one in found for each in _switched(one))


def _renamed(given: Given) -> Given:
    section, _, key = given.name.rpartition(".")
    plain = f"{section}.{key.replace('-', '_')}".replace(".no_", ".no-") if section else key
    return replace(given, name=_FORMER.get(plain, plain))


def _switched(given: Given) -> Iterator[Given]:
    """Yields a switch where it is on; that of sequence parallelism where it is off."""
    words = tuple(word.lower() for word in given.words)
    if given.name == _SEQUENCES:
        if words == _OFF:
            yield replace(given, name=f"{_P}no-enable_sequence_parallel", words=())
    elif given.name in _SWITCHES:
        if words != _OFF:
            yield replace(given, words=() if words == _ON else given.words)
    elif not words or words[0] not in _EMPTY or given.name == CHECKPOINT:
        yield given
