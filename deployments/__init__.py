"""All input and output: Ray Serve, vLLM, HTTP, files."""
