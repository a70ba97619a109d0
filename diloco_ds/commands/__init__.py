"""The commands of `diloco-ds`: one module each, found by its name (diloco_ds/cli.py)."""
