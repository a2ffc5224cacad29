"""The built-in models: GPT, Llama and mixtures of experts."""
