"""Plans in the words of other launchers, and the way back."""
