"""Decoder, Encoder, Seq2Seq and Transcriber: configs, stacks of blocks, likelihoods, checkpoints."""
