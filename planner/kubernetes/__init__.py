"""Manifests of jobs and networks."""
