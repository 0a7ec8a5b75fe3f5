"""The HTTP agent: one module per group of endpoints."""
