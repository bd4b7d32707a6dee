"""Properties of pure code over generated inputs."""
