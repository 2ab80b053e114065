"""The HTTP side of process A: the OpenAI API, health and metrics over one TokenizerManager. Never imports torch."""
