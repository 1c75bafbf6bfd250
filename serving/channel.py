"""What both ends of a channel must agree on; limits hold per side and per direction."""

MAX_MESSAGE_BYTES = 16 << 20  # gRPC's own default is 4 MiB to receive
MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


def client_options(address: str) -> tuple[tuple[str, int], ...]:
    """Options of a client's channel; an http_proxy of the environment is not asked to
    reach this machine."""
    local = address.startswith(("localhost:", "127.", "[::1]", "unix:"))
    return (*MESSAGE_OPTIONS, ("grpc.enable_http_proxy", 0)) if local else MESSAGE_OPTIONS
