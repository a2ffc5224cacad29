"""The one name that an installed parplan imports by. Its rooms are links to the folders at the top
of the repository.
"""
