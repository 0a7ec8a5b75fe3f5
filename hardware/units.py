"""Units of the tables and of those who read them."""

from __future__ import annotations

GIB = 1024.0**3
GIGA = 1e9
TERA = 1e12
