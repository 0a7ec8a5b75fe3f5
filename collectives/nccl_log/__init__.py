"""The reader of NCCL's log: channels, transports, problems, verdict."""
