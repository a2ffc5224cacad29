"""States and the token table are priced where the host holds them."""
