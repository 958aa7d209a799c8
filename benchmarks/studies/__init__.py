"""Long experiments about the instrument itself. Nothing here is a benchmark; each module runs by itself."""
