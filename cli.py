"""The entry point of the command line; `commands` has one file per command.

The file of a command is imported when the command or the list of commands is asked for.
"""

from __future__ import annotations

from parplan.profiles.interrupts import ending_at_once

with ending_at_once():
    from parplan.commands.plan import main

main.names = (
    "calibrate",
    "check",
    "clusters",
    "compare",
    "completion",
    "diff",
    "doctor",
    "estimate",
    "explain",
    "export",
    "import",
    "init",
    "max-model",
    "models",
    "profile",
    "read",
    "report",
    "schema",
    "schemes",
    "show",
    "size",
    "stacks",
    "sweep",
    "tokenize",
    "trace",
    "validate",
)


if __name__ == "__main__":
    main()
