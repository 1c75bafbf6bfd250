"""What both ends of a channel must agree on; limits hold per side and per direction."""

MAX_MESSAGE_BYTES = 16 << 20  # gRPC's own default is 4 MiB to receive
MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
