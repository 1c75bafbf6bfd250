"""Requests, queues, streams and gRPC around an engine; no arrays outside the engine loop."""
