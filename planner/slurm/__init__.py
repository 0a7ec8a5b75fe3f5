"""Slurm: batch scripts, host lists in them, and topology.conf."""
