"""Slurm: batch scripts that are written, and those that are wrapped."""
