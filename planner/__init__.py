"""Pure: facts in, advice out (NCCL environment, parallel layout, forecast, manifests)."""
