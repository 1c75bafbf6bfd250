"""The wire: ``generation.proto`` and the code made from it by ``tools/generate_protos.py``."""
