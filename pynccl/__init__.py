"""NCCL for any Python array."""
