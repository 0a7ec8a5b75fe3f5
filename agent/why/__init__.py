"""Diagnosis of a run that is stuck, slow or failed."""
