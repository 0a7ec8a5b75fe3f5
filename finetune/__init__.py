"""The built-in fine-tune job: ``torchrun -m finetune.train``."""
