"""The papers: published tables, presets, the run behind each row, and the reproduction of a table."""
