"""Layers that model families share. They know nothing of schedules, loops or configurations."""
