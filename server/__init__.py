"""The gateway and the engine under it. Nothing here imports torch."""
