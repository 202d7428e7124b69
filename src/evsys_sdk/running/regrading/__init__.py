"""Stored rollouts graded anew: where they lie, what they are graded by, and what that changes."""
