"""HTML and Markdown for people."""
