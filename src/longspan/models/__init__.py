"""Models: Decoder, Encoder, Seq2Seq and Transcriber, with their configs, stacks, likelihoods and checkpoints."""
