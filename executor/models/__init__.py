"""The modules that run: GPT, Llama and experts."""
