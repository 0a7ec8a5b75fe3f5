"""Reads one host and changes nothing: every fact under the advice comes from here."""
