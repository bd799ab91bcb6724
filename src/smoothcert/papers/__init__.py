"""Filled below."""
