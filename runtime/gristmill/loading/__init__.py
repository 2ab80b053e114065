"""Reading models from disk: configuration (torch-free) and weights, from a Hugging Face directory or a GGUF file."""
