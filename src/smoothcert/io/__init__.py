"""Files and text from outside: atomic writes, locks, append-only results, YAML, printable text."""
