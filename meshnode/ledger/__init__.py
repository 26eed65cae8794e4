"""Accounts of work: leaves, roots, receipts, and whether they agree. Pure."""
