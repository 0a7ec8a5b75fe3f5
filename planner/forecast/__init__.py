"""Memory and step time of a layout."""
