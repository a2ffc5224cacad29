"""Megatron-Bridge and NeMo."""
