"""Ways to distribute a model, one folder each; a folder's `settings.py` is readable without torch."""
