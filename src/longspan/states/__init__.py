"""What is kept of earlier tokens: all keys and values, the last ones, or those that a pattern looks back at."""
