"""Hardware, software stacks, measured curves, and the profiles that users measure."""
