"""The schemes of parallel training, each over all GPUs of a request."""
