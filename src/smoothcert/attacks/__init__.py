"""Attacks on smoothed classifiers: functions that see a callable and work for any image shape."""
