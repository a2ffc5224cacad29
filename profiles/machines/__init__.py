"""Hardware, software stacks, measured curves, and the profile that a user has measured."""
