"""An operator is divided over mesh axes, and its kernels are priced on one rank."""
