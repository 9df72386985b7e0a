"""Evidence: acceptance length, speed and losslessness, measured on a running engine."""
