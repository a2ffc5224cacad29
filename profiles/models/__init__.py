"""The operator graph, the described families of models, and the sources of other modules."""
