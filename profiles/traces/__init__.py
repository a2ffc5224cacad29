"""Traces of training steps that profilers wrote, read into one record whatever their format."""
