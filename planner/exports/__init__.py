"""The layout in the words of each training framework."""
