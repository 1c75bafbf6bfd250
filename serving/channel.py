"""What both ends of a channel must agree on; limits hold per side and per direction."""

MAX_MESSAGE_BYTES = 16 << 20  # gRPC's own default is 4 MiB to receive
MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
# Whoever is gone without a word (a machine, a network) is found out by pings.
KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),  # as many as it takes: a stream may wait for long
)
OPTIONS = (*MESSAGE_OPTIONS, *KEEPALIVE_OPTIONS)


def client_options(address: str) -> tuple[tuple[str, int], ...]:
    """Options of a client's channel; an http_proxy of the environment is not asked to
    reach this machine."""
    local = address.startswith(("localhost:", "127.", "[::1]", "unix:"))
    return (*OPTIONS, ("grpc.enable_http_proxy", 0)) if local else OPTIONS
