"""ASK: one file a command; options are typed where they are parsed."""
