"""Pure functions from facts to advice: NCCL environment, parallel layout, forecast, manifests."""
