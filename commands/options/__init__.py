"""Options that commands share, by subject, and the records that pack them."""
