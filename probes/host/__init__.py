"""What a probe may ask of a machine: live, recorded, recording."""
