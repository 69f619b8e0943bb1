"""GPUs of this host: memory, streams, events, and what of NVIDIA's stack is here."""
