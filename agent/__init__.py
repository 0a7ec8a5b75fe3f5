"""Composition root: the command line, the HTTP agent, the gate and the launcher."""
