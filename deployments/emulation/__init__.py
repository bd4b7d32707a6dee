"""The emulated engine: a real engine with vLLM's HTTP endpoints that obeys scripted timing and faults."""
