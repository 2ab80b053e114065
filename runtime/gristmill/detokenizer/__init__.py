"""Process C: turns the ids of running requests into text as they come: incremental UTF-8 and stop strings. Never imports torch."""
