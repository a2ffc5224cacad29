"""Keys of a config.json that change no cost of the operator graph, and are left out."""

from __future__ import annotations

# what the file is, and how transformers loads and generates
_LIBRARY = """
_attn_implementation _attn_implementation_autoset cache_implementation for_llm_compressor
_commit_hash _name_or_path add_cross_attention architectures auto_map bad_words_ids
begin_suppress_tokens bos_token_id
chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
gradient_checkpointing id2label initializer_factor initializer_range is_decoder is_encoder_decoder
label2id length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups
num_beams num_labels num_logits_to_keep num_return_sequences output_attentions
output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp
problem_type pruned_heads quantization_config remove_invalid_values repetition_penalty return_dict
return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript
transformers_version typical_p unsloth_version use_bfloat16 use_cache
"""
# initial values, and checkpoints of older code
_TRAINING = """
classifier_dropout init_method init_std mup_width_multiplier rescale_prenorm_residual
scale_attn_by_inverse_layer_idx scale_attn_weights reorder_and_upcast_attn summary_activation
summary_first_dropout summary_proj_to_labels summary_proj_to_logits summary_type summary_use_proj
layer_norm_eps_cv
"""
# factors and angles: a product with a number is part of a kernel
_FACTORS = """
attention_multiplier attn_scale attn_temperature_tuning embedding_multiplier floor_scale
initial_context_length logits_scaling original_max_position_embeddings query_pre_attn_scalar
residual_multiplier rope_interleave rope_local_base_freq rope_scaling rope_type swiglu_alpha
swiglu_limit
"""
# the router: its function, groups of experts, factors, and losses that balance
_ROUTER = """
aux_loss_alpha ep_size n_group norm_topk_prob routed_scaling_factor router_aux_loss_coef
router_jitter_noise scoring_func seq_aux topk_group topk_method moe_router_dtype
"""
# a decoder of speech: how it generates, and masks of the input
_SPEECH = """
alignment_heads apply_spec_augment classifier_proj_size forced_decoder_ids lang_to_id
mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks
mask_time_prob median_filter_width scale_embedding task_to_id
"""
# of files whose keys for experts, shared layers or images belong to other models of the maker
_OTHERS = """
anyres_pooling_size cla_share_factor dense_list eod_token_id full_attn_mod group_limited_greedy
im_end_id im_newline_id im_start_id interpolate_factor mask_init_id mlp_intermediate_size
moe_capacity moe_drop_tokens moe_norm_min moe_random_routing_dropped_token moe_use_aux_free
num_media_embeds org_vocab_size pad_id pool_type shared_moe_mode sliding_window_size text_end_id
text_start_id use_routing_bias
"""
# the kernels of state-space blocks
_STATE_SPACE = """
mamba_ssm_cache_dtype residual_in_fp32 time_step_floor time_step_limit time_step_max time_step_min
time_step_rank use_mamba_kernels mamba_hidden_act expand mtp_layers_block_type
mtp_hybrid_override_pattern moe_shared_expert_overlap
"""
_WRAPPER = """
boi_token_index boi_token_id eoi_token_index eoi_token_id image_token_id image_token_index
projector_hidden_act video_token_id video_token_index vision_end_token_id vision_start_token_id
vision_token_id
"""
# of a tower: sizes of heads that no model here has, and what its features are taken from
_TOWER = """
layer_norm_eps norm_eps projection_dim rms_norm_eps rope_parameters rope_theta spatial_patch_size
tokens_per_second vision_feature_layer vision_feature_select_strategy vocab_size
"""
_EVERY = (_LIBRARY, _TRAINING, _FACTORS, _ROUTER, _STATE_SPACE, _SPEECH, _OTHERS)
WITHOUT_COST = frozenset(" ".join(_EVERY).split())
# of a configuration around that of the text
WRAPPER_WITHOUT_COST = WITHOUT_COST | frozenset(_WRAPPER.split())
TOWER_WITHOUT_COST = WITHOUT_COST | frozenset(_TOWER.split())
