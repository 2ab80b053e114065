"""Process A's side of text: tokenizer and chat templates, request validation, and the manager of open requests. Never imports torch."""
