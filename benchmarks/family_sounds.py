"""Families of transformers that read sounds."""

from family_checkpoint import CLASSIFIER, SPECTROGRAM, WRITER, Family, sound

SOUND_FAMILIES: dict[str, Family] = {
    "wav2vec 2.0": sound("Wav2Vec2"),
    "wav2vec 2.0 large": sound("Wav2Vec2", norm="layer"),
    "wav2vec 2.0 classifier": sound("Wav2Vec2", CLASSIFIER),
    "wav2vec 2.0 conformer": sound("Wav2Vec2Conformer", norm="layer", position_embeddings_type="relative"),
    "HuBERT": sound("Hubert", norm="layer"),
    "HuBERT classifier": sound("Hubert", CLASSIFIER),
    "WavLM": sound("WavLM", CLASSIFIER, norm="layer"),
    "UniSpeech": sound("UniSpeech"),
    "UniSpeech-SAT": sound("UniSpeechSat", CLASSIFIER),
    "SEW": sound("SEW", squeeze_factor=2),
    "SEW-D": sound("SEWD", CLASSIFIER, squeeze_factor=2),
    "Whisper": Family(
        "Whisper", WRITER,
        {
            "vocab_size": 258, "pad_token_id": 256, "bos_token_id": 256, "eos_token_id": 256,
            "decoder_start_token_id": 257, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
            "num_mel_bins": 80, "max_source_positions": 50, "max_target_positions": 64, "begin_suppress_tokens": None,
        },
        SPECTROGRAM, {"feature_size": 80, "chunk_length": 1},
    ),
    "Data2Vec audio": sound("Data2VecAudio", norm="layer", conv_pos_kernel_size=3),
}  # fmt: skip
