"""Tests of the emulated engine."""
