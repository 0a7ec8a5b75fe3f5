"""Data sheets and measurements: one row per GPU, NIC and machine, each with its source."""
