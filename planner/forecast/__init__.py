"""Forecast of the memory and step time of a parallel layout."""
