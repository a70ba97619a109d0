"""The one error a user can put right."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right: one line that says what, where, and what would be right. Exit code 2."""
