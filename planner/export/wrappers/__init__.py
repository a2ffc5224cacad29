"""Programs around the Trainer of transformers: their own names, values and defaults."""
