"""HTML for people."""
