"""Settings of the public recipes that measured rows come from: data, no logic.

Each entry is a pattern at the start of an id, and cells of the rows that match it. They fill empty
cells alone, and an entry goes before those that follow it.

    nemoA100      conf/training/gpt3 of NVIDIA/NeMo-Framework-Launcher@a82887b5; the page of the
                  figures does not say that these runs used it
    nemolauncher  conf/training/nemotron and conf/peft of
                  NVIDIA/NeMo-Framework-Launcher@26e42fa91d, and grad_sync_dtype and fp8_params of
                  its examples/training/{gpt,llama}/h100 and examples/peft/llama/h100
    mbcard        src/megatron/bridge/recipes and perf_recipes of
                  NVIDIA-NeMo/Megatron-Bridge@067f987df0, as its model_verification_cards name them
    mbridge       src/megatron/bridge/perf_recipes of the same; recompute_modules of
                  scripts/performance/configs at v0.2.0 (releases 25.09 and 25.11), v0.3.1 (26.02),
                  v0.4.1 (26.04) and v0.5.0 (26.06)
    megh100       the degrees of the same model in the table of weak scaling of the same page
    mcoreci       tests/functional_tests/test_cases/*/model_config.yaml of
                  NVIDIA/Megatron-LM@d98e8a64dd. gpt3_15b: the first batch of the test's schedule;
                  256 GPUs are what its FLOPs and memory imply
    bloom         train/tr11-176B-ml/chronicles-prequel.md of bigscience-workshop/bigscience: the
                  heads of the 200B model, whose layers the tables vary, and those of line 680
"""

from __future__ import annotations

Cells = dict[str, str]

_QWEN3_30B = {"seq_len": "4096", "tp": "1", "pp": "1", "cp": "1", "micro_batch": "1"}
_NEMOTRON = {"gated_ffn": "false", "vocab": "256000", "positions": "rotary", "tied": "false"}
# DeepSeek-V3's attention, with which Megatron's tests of its parts run
_LATENT = {"latent": "1536 512 128 64 128", "shared_ffn_hidden": "1024", "vocab_multiple": "3232"}
_OFFLOADED = {
    **_LATENT,
    "offload": "expert_fc1 moe_act attn_norm mlp_norm qkv_linear core_attn attn_proj",
}
_SMALL_LATENT = {"latent": "192 64 16 8 16"}
# tests without --deterministic-mode
_RANDOM = "nondeterministic|reshard|loss_fusion|te_tp2_pp2_cp2|pp2_ep4_etp1"
_GROUPED = {"grouped_gemm": "true"}
_HYBRID = {
    "layer_pattern": "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    "state_space": "32 64 128 8",
}
_IN_STAGES = "M-M-M-M*-M-|M-M-M*-M-M-|M-M*-M-M-M-|M*-M-M-M-M-"
_NANO_4B = {"micro_batch": "1", "pp": "1", "ep": "1"}
_LIGHTNING = {"tp": "1", "pp": "1", "ep": "8", "seq_len": "8192"}
RECIPES: tuple[tuple[str, Cells], ...] = (
    (
        r"nemoA100-5b-",
        {"global_batch": "2048", "micro_batch": "4", "tp": "1", "pp": "1", "zero_stage": "1"},
    ),
    (
        r"nemoA100-175b-",
        {
            "global_batch": "2048",
            "micro_batch": "1",
            "tp": "4",
            "pp": "8",
            "vpp": "12",
            "sequence_parallel": "true",
            "zero_stage": "1",
        },
    ),
    (r"nemolauncher-(gpt3|llama\d)-.*-(pt|sft)$", {"gradients": "bf16"}),
    (r"nemolauncher-.*-sft$", {"narrow_weights": "true"}),
    (r"nemolauncher-.*-lora$", {"lora_rank": "32", "lora_targets": "qkv"}),
    (
        r"nemolauncher-nemotron-8b-",
        {"layers": "32", "hidden": "4096", "heads": "32", "ffn_hidden": "16384", **_NEMOTRON},
    ),
    (
        r"nemolauncher-nemotron-22b-",
        {"layers": "40", "hidden": "6144", "heads": "48", "ffn_hidden": "24576", **_NEMOTRON},
    ),
    (
        r"mbcard-gpt-oss-120b-pretrain-H100",
        {"tp": "2", "pp": "4", "cp": "1", "ep": "16", "micro_batch": "1"},
    ),
    (
        r"mbcard-gpt-oss-120b-peft-H100",
        {"tp": "1", "pp": "1", "cp": "1", "ep": "8", "global_batch": "128", "micro_batch": "1"},
    ),
    (
        r"mbcard-gpt-oss-20b-pretrain-H100",
        {"tp": "2", "pp": "4", "cp": "1", "ep": "4", "micro_batch": "1"},
    ),
    (
        r"mbcard-gpt-oss-20b-sft_long_context-H100",
        {"pp": "1", "ep": "8", "micro_batch": "1", "sequence_parallel": "true"},
    ),
    (r"mbridge-moonlight16b-|mbcard-moonlight-16b-a3b-", {"moments": "bf16"}),
    (
        r"mbcard-moonlight-16b-a3b-peft-",
        {"lora_rank": "8", "lora_targets": "q kv_down kv_up attention_out"},
    ),
    (r"mbcard-nemotron-3-nano-4b-pretrain-", {"tp": "1", "cp": "1", **_NANO_4B}),
    (
        r"mbcard-nemotron-3-nano-4b-sft_long_context-",
        {"global_batch": "8", "sequence_parallel": "true", **_NANO_4B},
    ),
    (r"mbcard-nemotron-3\.5-lightning-pretrain", {"micro_batch": "2", **_LIGHTNING}),
    (
        r"mbcard-nemotron-3\.5-lightning-(sft|peft)-",
        {**_LIGHTNING, "seq_len": "4096", "micro_batch": "1"},
    ),
    (r"mbcard-nemotron-3\.5-lightning-", {"micro_batch": "1", **_LIGHTNING}),
    (r"mbcard-nemotron-3-super-120b-a12b-pretrain", {"mtp_layers": "2"}),
    (r"mbcard-nemotron-3-super-120b-a12b-pretrain_performance-GB200", {"seq_len": "8192"}),
    (
        r"mbcard-nemotron-3-super-120b-a12b-pretrain\w*-H100",
        {"recompute": "selective layernorm+moe_act+moe+core_attn"},
    ),
    (
        r"mbcard-nemotron-3-super-120b-a12b-peft-",
        {"tp": "8", "pp": "1", "ep": "16", "global_batch": "16", "micro_batch": "1"},
    ),
    (
        r"mbcard-nemotron-3-super-120b-a12b-sft_long_context-",
        {
            **{"tp": "1", "pp": "8", "cp": "2", "ep": "2", "mtp_layers": "2"},
            **{"global_batch": "2", "micro_batch": "1", "recompute": "full"},
            "pipeline_layout": "Et*12|(t*12|)*6t*4mL",
        },
    ),
    (
        r"mbridge-26\.0[246].*-Nemotron_3_Nano-h100-16-fp8-",
        {"recompute": "selective moe+layernorm+core_attn+moe_act"},
    ),
    (r"mbridge-.*-Nemotron_3_Nano-h100-16-fp8-", {"recompute": "selective layernorm"}),
    (
        r"mbridge-.*-(DeepSeekV3|Kimi_K2)-g?b[23]00-256-",
        {"pipeline_layout": "Et*4|(t*4|)*14tmL"},
    ),
    (r"mbridge-.*-DeepSeekV3-h100-1024-", {"pipeline_layout": "Et|(tt|)*30mL"}),
    (
        r"mbridge-.*-GPT_OSS_120B-(b200|gb200|h100)-\d+-bf16-"
        r"|mbcard-gpt-oss-120b-.*_performance-GB200",
        {"recompute": "selective layernorm+moe_act"},
    ),
    (r"mbridge-.*-Qwen3_(30B|235B)_", {"recompute": "none"}),
    (r"mbridge-.*-DeepSeekV3-h100-", {"recompute": "selective mla_up_proj+mlp"}),
    (r"mbridge-.*-DeepSeekV3-gb200-.*-(fp8-cs|nvfp4)", {"recompute": "selective mlp"}),
    (r"mbridge-26\.04.*-DeepSeekV3-gb200-", {"recompute": "selective mlp"}),
    (r"mbridge-25.*-DeepSeekV3-gb300-", {"recompute": "selective moe_act"}),
    (r"mbridge-26\.0[68].*-DeepSeekV3-gb300-", {"recompute": "none"}),
    (r"mbridge-.*-(DeepSeekV3|Kimi_K2)-", {"recompute": "selective mla_up_proj"}),
    (r"mbcard-deepseek-v3-.*-H100", {"recompute": "selective mla_up_proj+mlp"}),
    (r"nemolauncher-llama2-7b-8-sft", {"recompute": "none"}),
    (r"nemolauncher-llama2-13b-8-sft", {"recompute": "none", "vpp": "10"}),
    (r"nemolauncher-llama2-70b-16-sft", {"recompute": "none", "vpp": "20"}),
    (
        r"megh100-strong-177B-",
        {"tp": "8", "pp": "6", "cp": "1", "sequence_parallel": "true", "zero_stage": "1"},
    ),
    (r"mbcard-qwen3-30b-a3b-pretrain_performance-H100", _QWEN3_30B | {"ep": "16"}),
    (
        r"mbcard-qwen3-30b-a3b-pretrain_performance-GB200",
        _QWEN3_30B | {"ep": "8", "micro_batch": "4", "recompute": "none"},
    ),
    (
        r"mcoreci-gpt-gpt3_15b_8t_release(_sm)?-",
        {"global_batch": "384", "n_gpus": "256", "vocab": "256000"},
    ),
    (
        r"mcoreci-(gpt|mixtral|nemotron)-.*_release|mcoreci-.*(7b_.*_memory_speed|overlap_grad_reduce)",
        {"overlap": "grad"},
    ),
    (r"mcoreci-gpt-.*_qk_layernorm_", {"qk_norm": "head"}),
    (r"mcoreci-bert-", {"vocab": "30522"}),
    (r"mcoreci-gpt-gpt3_mcore_te_tp2_pp2_(mla|dsa)", _SMALL_LATENT),
    (
        r"mcoreci-moe-.*_ep4_etp1_no_mtp_no_a2a_ovlp_fine_grained_offloading",
        {**_OFFLOADED, "dense_layers": "3", "pipeline_layout": "Et*3|(tt|)*6L"},
    ),
    (
        r"mcoreci-moe-.*_ep4_etp1_fine_grained_offloading",
        {
            **_OFFLOADED,
            "dense_layers": "3",
            "mtp_layers": "1",
            "pipeline_layout": "Et*3|(tt|)*6mL",
        },
    ),
    (
        r"mcoreci-moe-.*_ep4_etp1_selective_recompute_experimental",
        {
            **_LATENT,
            "dense_layers": "3",
            "mtp_layers": "1",
            "pipeline_layout": "Et*3|(tt|)*6tmL",
        },
    ),
    (
        r"mcoreci-moe-.*_ep4_etp1_(memory_speed|mtp_resume)",
        {**_LATENT, "dense_layers": "1", "mtp_layers": "1", "vpp": "4"},
    ),
    (
        r"mcoreci-moe-.*_ep4_etp1_resume_torch_dist_attn_cudagraph",
        {**_LATENT, "dense_layers": "1", "vpp": "4"},
    ),
    (
        r"mcoreci-moe-.*_tp4_ep2_etp2_pp2_scoped_cudagraph",
        {
            "shared_ffn_hidden": "512",
            "dense_layers": "4",
            "mtp_layers": "1",
            "pipeline_layout": "Et|(tt|)*6mL",
        },
    ),
    (r"mcoreci-moe-.*_tp4_ep2_etp2_pp2_", {"shared_ffn_hidden": "512"}),
    (r"mcoreci-moe-deepseek_proxy_", {"latent": "256 128 128 64 128", "vocab_multiple": "64"}),
    (r"mcoreci-bert-|mcoreci-gpt-gpt3_mcore_tp", {"engine": "local"}),
    (r"mcoreci-moe-gpt3_mcore_tp\d_pp\d_(ep2|resume)_", {"engine": "local"}),
    (rf"mcoreci-(gpt|moe)-gpt3_(moe_)?mcore_(?!.*({_RANDOM}))", {"deterministic": "true"}),
    (
        r"mcoreci-moe-.*(groupedGEMM|top2router|ddp_average|etp1_ep4|_ep8_|ep4_etp1|etp2_pp2)",
        _GROUPED,
    ),
    (r"mcoreci-hybrid-hybrid_mr_mcore_te_tp1_pp[24]_", _HYBRID | {"layer_pattern": _IN_STAGES}),
    (r"mcoreci-hybrid-hybrid_mr_", _HYBRID),
    (r"mcoreci-gpt-.*_pp4_vp1_uneven_pipeline", {"pipeline_layout": "Et*2|(t*4|)*2t*2L"}),
    (r"bloom-l586-187B-", {"heads": "64"}),
    (r"bloom-l[45]\d\d-", {"heads": "96"}),
)
