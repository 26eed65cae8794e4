"""Choosing, reserving and checking routes. Pure: `now` is passed in, and nothing here sends or waits."""
