"""Tests and benchmarks; the folders mirror what they test with."""
