"""Families of transformers that read sounds."""

from family_checkpoint import CLASSIFIER, Family, sound

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
    "Data2Vec audio": sound("Data2VecAudio", norm="layer", conv_pos_kernel_size=3),
}
