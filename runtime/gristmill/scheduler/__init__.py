"""All scheduling decisions, as pure integers: which requests run, in which slots, in which step. Never imports torch."""
