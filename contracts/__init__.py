"""The types and documents that cross package borders, and their one codec."""
