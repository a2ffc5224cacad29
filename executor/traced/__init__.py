"""A traced module's plan is run here."""
