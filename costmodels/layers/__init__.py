"""A layer is priced: compute, tensor-parallel communication, model states and saved activations."""
