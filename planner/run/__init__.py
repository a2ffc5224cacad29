"""run.json: what a run measured, beside what was predicted."""
