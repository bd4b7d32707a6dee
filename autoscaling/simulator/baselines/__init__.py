"""Routing and scaling as users run them today, behind the interfaces of the live policies.

Each baseline keeps the defaults its project ships or documents (the source is in its docstring) and sees what it sees
in reality: a gateway's own counts exactly, replicas' samples with their lag. ``tables.py`` lists them by name.
"""
