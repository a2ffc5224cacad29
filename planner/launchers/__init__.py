"""The programs that run plans, the best plan of each, and a plan beside them."""
