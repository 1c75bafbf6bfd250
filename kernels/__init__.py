"""Array kernels for TPU with their plain references; they know arrays, not models."""
