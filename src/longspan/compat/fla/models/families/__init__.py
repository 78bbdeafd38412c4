"""The model types, one module each; each defines ``FAMILIES``, a tuple of ``family.Family``."""
