"""Terminal output: tables of 80 columns, status words with glyphs, failures first with the remedy."""
