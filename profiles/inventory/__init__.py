"""The user's own machine: tools that show it, drafts of its cluster file, and its checks."""
