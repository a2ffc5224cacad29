"""The user's options become one request."""
