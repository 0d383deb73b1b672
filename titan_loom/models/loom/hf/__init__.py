"""LOOM for transformers: what every export carries. The other files here need torch and transformers only."""
