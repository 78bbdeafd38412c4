"""Helpers that know nothing of attention: files, locks, progress, specs, pictures, optional packages."""
