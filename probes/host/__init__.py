"""The interface between a probe and a host, with three implementations: live, recorded, recording."""
