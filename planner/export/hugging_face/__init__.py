"""The Trainer of transformers, and accelerate."""
