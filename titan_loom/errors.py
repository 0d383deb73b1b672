"""The exceptions whose text is meant for the person who started the run."""


class UserError(ValueError):
    """A mistake in what the user gave us: one sentence with the key, the value found and what is allowed.

    The entry points print the sentence without a traceback and exit with status 2.
    """


class Interrupted(Exception):
    """The run was stopped by a signal after saving; the text says which signal and what was saved."""
