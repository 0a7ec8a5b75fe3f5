"""Measures collectives with real ranks, and reads NCCL's own log for what the wire did."""
