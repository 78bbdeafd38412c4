"""Linear maps whose weights are blocks of few bits."""
