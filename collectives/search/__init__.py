"""Search for the bad nodes of a fleet: `topoflight search`."""
