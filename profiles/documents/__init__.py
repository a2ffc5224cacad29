"""Reading of files from outside: bounded, typed, and refused with the place of a fault."""
