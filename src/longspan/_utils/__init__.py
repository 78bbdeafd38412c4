"""Helpers without attention: files, locks, progress, specs, pictures, optional packages."""
