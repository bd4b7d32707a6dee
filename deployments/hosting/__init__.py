"""Tidegate on other people's clusters: image, KubeRay and Anyscale manifests, and how a node leaves."""
