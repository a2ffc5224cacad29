"""The ways to run one pipeline rank, and one for each: columns and the master program."""
