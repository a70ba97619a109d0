"""Measurements of the parts of the system, side by side in one run: `diloco-ds bench`."""
