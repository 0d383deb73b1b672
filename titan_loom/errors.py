"""The exceptions whose text is meant for the person who started the run."""


class UserError(ValueError):
    """A mistake in what the user gave us: one sentence with the key, the value found and what is allowed.

    The entry points print the sentence without a traceback and exit with status 2.
    """


class Interrupted(Exception):
    """The run was stopped by a signal after saving; the text says which signal and what was saved."""


class RunError(RuntimeError):
    """What ends a run through no mistake of the user's: one sentence, printed without a traceback, and status 1."""


class ReadError(RunError):
    """A source cannot be read any further."""

    def __init__(self, source: str, part: str, reason: str, row: int | None = None):
        super().__init__(source, part, reason, row)
        self.source, self.part, self.reason, self.row = source, part, reason, row

    def __str__(self) -> str:
        place = self.part if self.row is None else f"{self.part}, row {self.row}"
        return f"data.sources.{self.source}: {place} cannot be read: {self.reason}"
