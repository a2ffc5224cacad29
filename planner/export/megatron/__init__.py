"""Megatron-LM."""
