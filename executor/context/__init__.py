"""Context parallelism: ranks that divide every sequence, and the forms of their attention."""
