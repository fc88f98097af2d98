"""Camera pipelines: sources, detection, tracking and the choice of what is worth describing."""
