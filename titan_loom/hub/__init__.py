"""What leaves the trainer: exports for transformers, and text."""
