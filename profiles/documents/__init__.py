"""Files from outside are read here: bounded, typed, and refused with the place of the fault."""
