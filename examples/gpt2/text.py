"""Text for people."""


def table(rows: dict[str, str]) -> str:
  """Returns names and values in two columns."""
  width = max(map(len, rows))
  return '\n'.join(f'{name:{width}}  {value}' for name, value in rows.items())
