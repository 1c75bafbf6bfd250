"""Fields that a client sends and this server does not have: refused, not ignored."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tpuspec.serving.errors import ErrorCode, RequestError


def refuse(message: Message, path: str = "") -> None:
    """Raises RequestError if the message, or one inside it, has an unknown field."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = f"{path}{unknown[0].field_number}"
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT, f"{number} is not the number of a field that this "
            f"server knows of {message.DESCRIPTOR.full_name}", field=number)
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        is_map = field.message_type.GetOptions().map_entry
        children = value.values() if is_map else [value] if isinstance(value, Message) else value
        for child in children:
            if isinstance(child, Message):  # a map's may be numbers
                refuse(child, f"{path}{field.name}.")
