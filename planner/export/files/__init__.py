"""The files of launchers: their text is read and written."""
