"""The model families, one file each, named by Hugging Face's model_type: config.json in, DecoderSpec out."""
