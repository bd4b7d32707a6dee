"""Discrete-event simulator that drives the live policies over modelled engines, clients and faults."""
