"""From a config to CUDA text, and from the text to machine code."""
