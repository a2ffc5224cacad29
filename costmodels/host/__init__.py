"""Model states and the token table in host memory are priced."""
