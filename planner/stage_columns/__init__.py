"""The ways to run one pipeline stage: the columns of the master program."""
