"""Speech: audio files, log-mel features, CTC, labels and corpora."""
