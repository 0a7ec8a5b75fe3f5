"""Network interfaces and their roles."""
