"""Text and ids, as worker and API both make them of a model's tokenizer. Needs `tokenizers` and `jinja2`."""
