"""Runs a plan on GPUs through NCCL, or on CPUs through gloo."""
