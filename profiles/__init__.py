"""KNOW: models, machines and what was measured of them."""
