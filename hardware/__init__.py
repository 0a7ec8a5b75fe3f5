"""One row per GPU, NIC and machine, each with its source."""
