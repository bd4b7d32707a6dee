"""Sense, detect, adapt: one pure tick, and the ledger of its decisions."""
