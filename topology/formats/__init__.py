"""nvidia-smi topo -m and NCCL topology XML."""
