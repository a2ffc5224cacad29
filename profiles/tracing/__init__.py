"""Any module is recorded as the same operator graph that described models have."""
