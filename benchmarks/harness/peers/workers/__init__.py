"""One process for each engine. These files run where nothing is installed but that engine: standard library only."""
