"""Decisions of Tidegate: pure functions and state machines, values in, decisions with reasons out."""
