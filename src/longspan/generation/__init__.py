"""Generation from a decoder: sampling, beam search, and the native token step."""
