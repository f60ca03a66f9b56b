"""A part of a text file that is generated, between two comments."""


def replace(text: str, name: str, content: str) -> str:
    """Put ``content`` between the lines ``<!-- name:begin -->`` and ``<!-- name:end -->``.

    Raises:
      ValueError: A marker is absent.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found_begin, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(
            f"update_readme: a {name} stands between two markers; got no "
            f"{end if found_begin else begin}. Add a line {begin} and a line {end}."
        )
    return f"{head}{begin}\n\n{content}\n{end}{tail}"
