"""The gRPC door: vLLM's engine service, as the gateway smg and its clients call it, and gRPC's own health service.

Token ids go in and come out, so that a gateway in front renders, tokenizes and parses. Needs the extra `grpc`; only
servers with `--grpc-port` or `--grpc-uds` import this package.
"""
