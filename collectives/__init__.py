"""Benchmark collectives with real ranks, and read NCCL's log for the transports that were used."""
