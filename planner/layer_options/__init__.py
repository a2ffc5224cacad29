"""The ways to run one block, and mixes of them."""
