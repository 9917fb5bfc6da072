"""The one error that these tools report to their user."""


class PackError(Exception):
    """Names the file, and the line or row where there is one. Shown without a traceback."""
