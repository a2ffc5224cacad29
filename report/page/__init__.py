"""The HTML page of plans: tables, charts and text in one file."""
