"""What the terminal shows: tables of 80 columns, words beside glyphs, failures first with the remedy."""
