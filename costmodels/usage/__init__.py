"""Memory, traffic and redundant bytes of one rank."""
