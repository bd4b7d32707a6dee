"""Whole runs of the simulator."""
