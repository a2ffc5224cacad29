"""When nothing fits, the shortfall is explained here."""
