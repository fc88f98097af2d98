"""The benchmarks' error."""


class BenchError(Exception):
    """Nothing can be measured as asked; the message has one line that says what to do."""
