"""The operator graph, the described families of models, and the sources of modules that are not
described.
"""
