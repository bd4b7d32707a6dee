"""The same HTTP cases over the emulated engine and over real vLLM."""
