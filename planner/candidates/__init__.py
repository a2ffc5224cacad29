"""Candidates: meshes, micro-batches and schedules, with their legality and lower bounds."""
