"""What errors of other libraries say, in one line, to stand in a message of ours."""


def first_line(error: Exception) -> str:
    """The first line of what it says, or its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
