"""Checkpoints in, checkpoints out: what a drafter is, what it learns from, how it learns, and how it is judged."""
