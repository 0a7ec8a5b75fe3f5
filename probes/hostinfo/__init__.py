"""The machine itself."""
