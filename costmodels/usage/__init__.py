"""One rank's memory, traffic and redundant bytes are counted here."""
