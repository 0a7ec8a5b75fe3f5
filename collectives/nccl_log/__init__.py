"""Read NCCL's log: channels, transports, problems, verdict."""
