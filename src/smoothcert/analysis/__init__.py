"""The analyses that the papers show: each gives numbers, a figure, and a CSV file of the numbers behind it."""
