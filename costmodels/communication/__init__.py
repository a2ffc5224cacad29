"""The mesh, the collectives on it, and the change from one placement to another."""
