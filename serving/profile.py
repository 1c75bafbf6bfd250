"""``tpuspec profile``: a profiler trace of a running server, brought to this machine."""

import argparse
import asyncio
import contextlib
import json
import pathlib
import sys
import tempfile
from collections.abc import AsyncIterable
from typing import Any

import grpc.aio

from tpuspec.protos import generation_pb2 as pb
from tpuspec.serving.client import Client
from tpuspec.serving.generate import client_security


def run(args: argparse.Namespace) -> int:
    if sys.stderr.isatty():
        print(f"tracing {args.server} for {args.seconds:g} s ...", file=sys.stderr)
    document = asyncio.run(_fetch(args))
    if args.json:
        print(json.dumps(document))
    else:
        print(f"traced {document['seconds']:.1f} s; on the server it lies in "
              f"{document['server_directory']}, here:", *document["files"], sep="\n")
        print(f"xprof --logdir {args.output} shows it")
    return 0


async def _fetch(args: argparse.Namespace) -> dict[str, Any]:
    async with Client(args.server, client_security(args)) as client:
        async with contextlib.aclosing(client.profile(args.seconds)) as responses:
            try:
                return await save(responses, pathlib.Path(args.output))
            except grpc.aio.AioRpcError as error:
                raise ValueError(f"no trace of {args.server}: {error.code().name}: "
                                 f"{error.details()}") from None


async def save(responses: AsyncIterable[pb.ProfileResponse],
               output: pathlib.Path) -> dict[str, Any]:
    """Writes a trace's files below ``output``: all of them, or none if the stream breaks off.

    Returns:
      The document that ``--json`` prints.

    Raises:
      ValueError: a file would lie elsewhere.
      OSError: a file is there already, or cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    seconds, directory = 0.0, ""
    names: list[pathlib.PurePosixPath] = []
    with tempfile.TemporaryDirectory(dir=output, prefix=".unfinished-") as unfinished:
        async for response in responses:
            if not response.file:
                seconds, directory = response.seconds, response.directory
                continue
            name = pathlib.PurePosixPath(response.file)
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"the server sent a file that is not of a trace: {name}")
            path = pathlib.Path(unfinished, name)
            if name not in names:
                names.append(name)
                path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(response.data)
        for name in names:
            if (output / name).exists():
                raise FileExistsError(f"{output / name} exists already")
        for name in names:
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            pathlib.Path(unfinished, name).rename(output / name)
    return {"seconds": seconds, "server_directory": directory,
            "files": [str(output / name) for name in names]}
