"""The fine-tune job that ships: ``torchrun -m finetune.train``."""
