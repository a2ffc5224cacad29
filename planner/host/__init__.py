"""What may be kept on the host, and what that costs."""
