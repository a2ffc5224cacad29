"""Turns the user's options into one request."""
