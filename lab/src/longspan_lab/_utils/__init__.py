"""Pictures and tables of measurements."""
