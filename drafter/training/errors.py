"""The error of training: something that a person must change before it can go on."""


class TrainingError(ValueError):
    """Says what was found, what was expected and what to do."""
