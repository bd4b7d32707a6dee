"""Requests of a simulated run: parsers of recorded traces, rate curves, and generators with a seeded stream each."""
