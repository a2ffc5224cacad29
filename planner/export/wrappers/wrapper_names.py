"""Arguments of programs around the Trainer that leave a step as it is.

They choose the model and the data by name, and say schedules of the learning rate, names of runs,
lines, checkpoints, evaluation and generation.
"""

from __future__ import annotations

from parplan.planner.export.fields.harmless import harmless

TRL_NAMES = harmless(
    "huggingface/trl at f2cd57710a, trl/trainer/sft_config.py, model_config.py, scripts/utils.py",
    """completion_only_loss assistant_only_loss eos_token pad_token truncation_mode shuffle_dataset
    router_aux_loss_coef ignore_bias_buffers loss_type lora_task_type pad_to_multiple_of
    bnb_4bit_quant_type use_bnb_nested_quant""",
)
LLAMA_FACTORY_NAMES = harmless(
    "hiyouga/LLaMA-Factory at ff6d4d12ee, src/llamafactory/hparams",
    """template media_dir train_on_prompt mask_history buffer_size mix_strategy interleave_probs
    max_samples ignore_pad_token_for_loss val_size tool_format default_system
    enable_thinking preserve_thinking tokenized_path data_shared_file_system
    split_special_tokens add_tokens add_special_tokens new_special_tokens
    write_batch_size_config init_special_tokens rope_scaling moe_aux_loss_coef
    use_reentrant_gc train_from_scratch infer_* offload_folder use_kv_cache hf_hub_token
    ms_hub_token om_hub_token print_param_status image_* video_* crop_to_patches
    use_audio_in_video audio_sampling_rate export_* vllm_* sglang_* compute_accuracy
    disable_shuffling early_stopping_steps plot_loss include_effective_tokens_per_second
    use_swanlab ray_* resources_per_worker placement_strategy master_addr master_port
    enable_torch_profiler profiler_* profile_modules top_p top_k temperature do_sample
    max_new_tokens num_beams repetition_penalty length_penalty skip_special_tokens""",
)
AXOLOTL_NAMES = harmless(
    "axolotl-ai-cloud/axolotl at 067b021c8b, src/axolotl/utils/schemas",
    """base_model base_model_config base_model_ignore_patterns model_type cls_model_config
    processor_type processor_kwargs is_* strict datasets* test_datasets*
    pretraining_dataset* shuffle_* skip_prepare_dataset num_dataset_shards_to_save
    auto_resume_from_checkpoints val_set_size num_epochs train_on_inputs eval*
    saves_per_epoch lr_scheduler lr_quadratic_warmup cosine_* lr_div_factor adam_epsilon2
    adam_eps streaming_multipack_buffer_size adam_beta3 embedding_lr* group_by_length
    special_tokens* tokens* added_tokens_overrides use_wandb use_mlflow use_comet
    use_tensorboard use_trackio hf_* gradio_* otel_* use_otel_metrics use_ray ray_*
    save_safetensors sample_packing_group_size sample_packing_bin_size
    sample_packing_sequentially sample_packing_eff_est sample_packing_mp_start_method
    pretrain_multipack_* total_num_tokens total_supervised_tokens eot_tokens
    default_system_message fix_untrained_tokens min_sample_len excess_length_strategy
    loss_watchdog_* resize_token_embeddings_to_32x mean_resizing_embeddings
    embeddings_skip_upcast gc_steps gc_collect_steps include_tkps do_causal_lm_eval
    do_bench_eval bench_* generate_samples num_generation_samples device profiler_steps*
    curriculum_sampling experimental_skip_move_to_device role_boundaries* image_size
    image_resize_algorithm remove_unused_columns dataloader_* gpu_memory_limit seed
    tokenizer_* merge_method lora_model_dir lora_fan_in_fan_out""",
)
SWIFT_NAMES = harmless(
    "modelscope/ms-swift at 3602360a56, swift/arguments and swift/trainers/arguments.py",
    """model model_type model_revision model_name model_author model_kwargs template system
    val_dataset* cached_dataset cached_val_dataset split_dataset_ratio load_from_cache_file
    interleave_prob stopping_strategy shuffle_buffer_size download_mode columns strict
    custom_dataset_info custom_register_path external_plugins lazy_tokenize use_hf hub_token
    truncation_strategy max_pixels agent_template norm_bbox use_chat_template padding_side
    loss_scale template_backend response_prefix enable_thinking create_checkpoint_symlink
    add_version acc_strategy train_dataloader_shuffle max_epochs check_model
    resume_only_model safe_serialization max_shard_size load_args load_data_args
    max_new_tokens temperature top_k top_p repetition_penalty num_beams stream stop_words
    tuner_backend packing_num_proc router_aux_loss_coef eval* callbacks early_stop_interval
    ignore_args_error rope_scaling new_special_tokens local_repo_path use_ray""",
)
