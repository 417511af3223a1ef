"""tools/export_model.py and its parts, as a part of the package."""
