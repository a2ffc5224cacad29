"""The measurements of a run or a dry run, beside their predictions."""
