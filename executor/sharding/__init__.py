"""Parameters are placed, sharded and overlapped here."""
