"""Arguments of the Trainer, of accelerate and of DeepSpeed that leave a step as it is.

They choose the model and the data by name, and say schedules of the learning rate, names of runs,
lines, checkpoints, evaluation and the start of processes. Sizes of DeepSpeed's fetches are among
them: the price of ZeRO 3 has the bucket of reductions alone.
"""

from __future__ import annotations

from parplan.planner.export.fields.harmless import harmless

TRAINER_NAMES = harmless(
    "transformers 5.23.0, transformers/training_args.py and examples/pytorch/language-modeling",
    """output_dir overwrite_output_dir num_train_epochs max_steps learning_rate lr_scheduler_*
    warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    average_tokens_across_devices label_smoothing_factor bf16_full_eval fp16_full_eval
    use_cache neftune_noise_alpha torch_empty_cache_steps logging_* log_level*
    log_on_each_node include_num_input_tokens_seen disable_tqdm report_to run_name project
    trackio_* eval_* evaluation_strategy per_device_eval_batch_size prediction_loss_only
    include_for_metrics include_inputs_for_metrics include_tokens_per_second
    batch_eval_metrics save_* enable_jit_checkpoint push_to_hub* hub_*
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint seed data_seed dataloader_* num_workers
    remove_unused_columns label_names train_sampling_strategy length_column_name
    ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph ddp_backend
    ddp_timeout debug skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint
    local_rank tf32 accelerator_config* past_index logging_dir jit_mode_eval use_cpu no_cuda
    predict_with_generate generation_* use_legacy_prediction_loop
    gradient_checkpointing_kwargs* activation_checkpointing_kwargs*
    fsdp_transformer_layer_cls_to_wrap fsdp_config.transformer_layer_cls_to_wrap
    fsdp_config.state_dict_type fsdp_config.final_state_dict_type
    fsdp_config.cpu_ram_efficient_loading fsdp_config.sync_module_states
    fsdp_config.use_orig_params fsdp_config.cpu_offload_pin_memory
    fsdp_config.min_num_params fsdp_config.limit_all_gathers fsdp_config.forward_prefetch
    fsdp_config.backward_prefetch fsdp_config.xla_fsdp_grad_ckpt fsdp_config.xla_fsdp_v2
    model_name_or_path model_id model_revision model_code_revision tokenizer_*
    use_fast_tokenizer use_auth_token config_name config_overrides token trust_remote_code
    low_cpu_mem_usage cache_dir dataset* data_path data_files data_dir train_file
    validation_file validation_split* max_train_samples max_eval_samples streaming
    preprocessing_* overwrite_cache keep_linebreaks lazy_preprocess chat_template*
    use_flash_attn_unpad wandb_* comet_* mlflow_* swanlab_* config early_stopping_patience""",
)
ACCELERATE_NAMES = harmless(
    "accelerate 1.15.0, accelerate/commands/config/config_args.py and commands/launch.py",
    """config_file --config_file num_processes num_machines num_cpu_threads_per_process
    machine_rank gpu_ids main_process_ip main_process_port main_training_function
    rdzv_backend rdzv_conf same_network compute_environment debug enable_cpu_affinity
    downcast_bf16 tpu_* command_file commands use_mps_device mpirun_config* multi_gpu
    use_fsdp module no_python quiet monitor_interval max_restarts role tee log_dir
    fsdp_config.fsdp_transformer_layer_cls_to_wrap
    fsdp_config.fsdp_transformer_cls_names_to_wrap fsdp_config.fsdp_state_dict_type
    fsdp_config.fsdp_use_orig_params fsdp_config.fsdp_sync_module_states
    fsdp_config.fsdp_cpu_ram_efficient_loading fsdp_config.fsdp_forward_prefetch
    fsdp_config.fsdp_min_num_params fsdp_config.fsdp_limit_all_gathers
    fsdp_config.limit_all_gathers fsdp_config.forward_prefetch""",
)
DEEPSPEED_NAMES = harmless(
    "deepspeed 0.19.8, deepspeed/runtime/config.py and www.deepspeed.ai/docs/config-json",
    """steps_per_print wall_clock_breakdown memory_breakdown dump_state gradient_clipping
    prescale_gradients gradient_predivide_factor seed disable_allgather scheduler.*
    tensorboard.* wandb.* csv_monitor.* comet.* comms_logger.* monitor_config.*
    flops_profiler.* checkpoint.* dataloader_drop_last nebula.* optimizer.params.*
    optimizer.legacy_fusion zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    fp16.loss_scale* fp16.initial_scale_power fp16.hysteresis fp16.min_loss_scale
    fp16.consecutive_hysteresis bf16.check_grad_overflow
    zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size
    zero_optimization.round_robin_gradients zero_optimization.load_from_fp32_weights
    zero_optimization.elastic_checkpoint zero_optimization.sub_group_size
    zero_optimization.ignore_unused_parameters zero_optimization.legacy_stage1
    zero_optimization.stage3_* zero_optimization.prefetch_bucket_size
    zero_optimization.param_persistence_threshold
    zero_optimization.model_persistence_threshold zero_optimization.max_live_parameters
    zero_optimization.max_reuse_distance
    zero_optimization.gather_16bit_weights_on_model_save
    zero_optimization.memory_efficient_linear zero_optimization.log_trace_cache_warnings
    zero_optimization.use_all_reduce_for_fetch_params
    zero_optimization.module_granularity_threshold zero_optimization.override_module_apply
    zero_optimization.overlap_events_limit zero_optimization.offload_optimizer.pin_memory
    zero_optimization.offload_optimizer.buffer_count
    zero_optimization.offload_optimizer.fast_init
    zero_optimization.offload_optimizer.nvme_path
    zero_optimization.offload_optimizer.buffer_size
    zero_optimization.offload_optimizer.pipeline_*
    zero_optimization.offload_param.pin_memory zero_optimization.offload_param.buffer_*
    zero_optimization.offload_param.max_in_cpu zero_optimization.offload_param.nvme_path
    aio.* parplan* train_iters deepspeed_config""",
)
