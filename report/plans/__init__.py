"""One plan is printed: summary, memory, layers, strategies and chunks."""
