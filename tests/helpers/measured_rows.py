"""A row of a table of measured steps, as written and with all cells."""

from __future__ import annotations

from parplan.planner.validation.row_cells import OPTIONAL

ROW = {
    "id": "made-1",
    "framework": "Megatron-LM core 0.14",
    "gpu": "a100-80g-sxm",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "interconnect": "NVLink3",
    "model": "made",
    "layers": "8",
    "hidden": "1024",
    "heads": "16",
    "kv_heads": "",
    "head_dim": "",
    "ffn_hidden": "4096",
    "gated_ffn": "false",
    "vocab": "51200",
    "seq_len": "1024",
    "global_batch": "32",
    "micro_batch": "2",
    "dp": "4",
    "tp": "2",
    "pp": "2",
    "vpp": "",
    "cp": "",
    "ep": "",
    "experts": "",
    "sequence_parallel": "true",
    "zero_stage": "1",
    "recompute": "full",
    "dtype": "bf16",
    "step_time_s": "0.5",
    "derived_step_time_s": "",
    "peak_memory_gib": "4.0",
    "notes": "",
}
FULL = dict.fromkeys(OPTIONAL, "") | ROW
