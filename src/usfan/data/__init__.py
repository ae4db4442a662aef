"""Images and labels: sources, decoding, stores, views, and the named benchmarks."""
