"""TLS and tokens: who is refused, with which status, and that others are untouched."""

import asyncio
import contextlib
import datetime
import os
import pathlib

import grpc
import grpc.aio
import pytest
import trustme
from fake_engine import FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness import Running, run_cli, running
from request_fuzz import METHODS

from tpuspec.serving.channel import MAX_MESSAGE_BYTES
from tpuspec.serving.client import BlockingClient, Client, make_request
from tpuspec.serving.security import ClientSecurity, ServerSecurity, read_token


def write(path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority, tmp_path):
    """Paths of PEM files, by what they are."""
    made = {"ca": write(tmp_path / "ca.pem", authority.cert_pem.bytes()),
            "other_ca": write(tmp_path / "other.pem", trustme.CA().cert_pem.bytes())}
    long_ago = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificates = {
        "server": authority.issue_cert("localhost"), "client": authority.issue_cert("client.test"),
        "stranger": trustme.CA().issue_cert("client.test"),
        "expired": authority.issue_cert("localhost", not_before=long_ago,
                                        not_after=long_ago + datetime.timedelta(days=1))}
    for name, certificate in certificates.items():
        made[name] = write(tmp_path / f"{name}.pem",
                           b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
        made[f"{name}_key"] = write(tmp_path / f"{name}.key",
                                    certificate.private_key_pem.bytes())
    return made


def of_server(files, name="server", **more) -> ServerSecurity:
    return ServerSecurity(certificate=files[name], key=files[f"{name}_key"], **more)


def of_client(files, ca="ca", name=None, **more) -> ClientSecurity:
    return ClientSecurity(tls=True, ca=files[ca], certificate=files.get(name),
                          key=files.get(f"{name}_key"), **more)


async def status(address: str, security: ClientSecurity, *, timeout: float = 10.0):
    """The status of one request by a client of its own."""
    async with Client(address, security) as client:
        try:
            answer = [r async for r in client.generate(make_request([10, 5]), timeout=timeout)]
        except grpc.aio.AioRpcError as error:
            return error.code()
    assert [token.id for r in answer for token in r.tokens] == [11, 12, 13, 14, 15, 1]
    return grpc.StatusCode.OK


def on(security: ServerSecurity, body, **options) -> None:
    async def main() -> None:
        async with running(FakeEngine(), security=security, **options) as it:
            await body(it)

    asyncio.run(main())


def test_tls_and_who_cannot_talk_to_it(files):
    async def body(it: Running):
        good = of_client(files)
        assert await status(it.address, good) == grpc.StatusCode.OK
        assert await status(it.address, ClientSecurity()) == grpc.StatusCode.UNAVAILABLE
        assert await status(it.address, of_client(files, "other_ca")) == (
            grpc.StatusCode.UNAVAILABLE)
        reader, writer = await asyncio.open_connection(*it.address.split(":"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")  # not TLS at all
        await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        assert await status(it.address, good) == grpc.StatusCode.OK

        def blocking() -> int:
            with BlockingClient(it.address, good) as client:
                return client.get_model().limits.slots

        assert await asyncio.to_thread(blocking) == 2

    on(of_server(files), body)


def test_an_expired_certificate_is_refused_by_clients(files):
    async def body(it: Running):
        assert await status(it.address, of_client(files)) == grpc.StatusCode.UNAVAILABLE

    on(of_server(files, "expired"), body)


def test_mutual_tls_asks_clients_for_a_certificate(files):
    async def body(it: Running):
        for name, expected in (("client", grpc.StatusCode.OK),
                               (None, grpc.StatusCode.UNAVAILABLE),
                               ("expired", grpc.StatusCode.UNAVAILABLE),
                               ("stranger", grpc.StatusCode.UNAVAILABLE)):
            assert await status(it.address, of_client(files, name=name)) == expected, name

    on(of_server(files, client_ca=files["ca"]), body)


def test_a_renewed_certificate_is_taken_without_a_restart(files, authority, caplog):
    async def body(it: Running):
        assert await status(it.address, of_client(files)) == grpc.StatusCode.UNAVAILABLE
        for kind in ("", "_key"):
            with open(files[f"server{kind}"], "rb") as good:
                write_in_place(files[f"expired{kind}"], good.read())
        assert await status(it.address, of_client(files)) == grpc.StatusCode.OK

    def write_in_place(path, data):
        with open(path, "wb") as file:
            file.write(data)

    on(of_server(files, "expired"), body)


def test_tokens_of_a_file_that_is_read_again(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("first-token\n second-token \n")

    async def body(it: Running):
        async def with_token(token):
            return await status(it.address, ClientSecurity(token=token))

        for token in ("first-token", "second-token"):
            assert await with_token(token) == grpc.StatusCode.OK
        for token in (None, "", "third-token", "first-token x", "FIRST-TOKEN"):
            assert await with_token(token) == grpc.StatusCode.UNAUTHENTICATED, token
        path.write_text("third-token")
        assert await with_token("third-token") == grpc.StatusCode.OK
        assert await with_token("first-token") == grpc.StatusCode.UNAUTHENTICATED
        path.write_text("")  # torn in the middle of a change: what was known stays
        assert await with_token("third-token") == grpc.StatusCode.OK
        os.remove(path)
        assert await with_token("third-token") == grpc.StatusCode.OK
        assert await with_token("") == grpc.StatusCode.UNAUTHENTICATED
        async with grpc.aio.insecure_channel(it.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING  # probes have none
            listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                [_ async for _ in listing]
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        load = it.server._loop.load
        assert load.accepted == load.finished == 5  # nothing refused reached the engine

    on(ServerSecurity(tokens=str(path)), body)


def test_who_is_refused_leaves_a_running_stream_alone(files, tmp_path):
    """Plain text, foreign and expired certificates, no token and a wrong one, a message that is
    too large and a handshake that never ends, all beside one stream."""
    async def main():
        security = of_server(files, client_ca=files["ca"],
                             tokens=write(tmp_path / "tokens", b"a-token\n"))
        async with running(FakeEngine(step_seconds=0.05), security=security) as it:
            good = of_client(files, name="client", token="a-token")
            async with Client(it.address, good) as client:
                stream = client.generate(make_request([10], draft_length=0))
                await anext(stream)
                reader, writer = await asyncio.open_connection(*it.address.split(":"))
                writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a TLS greeting
                for bad, expected in (
                        (ClientSecurity(), grpc.StatusCode.UNAVAILABLE),
                        (of_client(files, "other_ca", name="client"), grpc.StatusCode.UNAVAILABLE),
                        (of_client(files, name="expired"), grpc.StatusCode.UNAVAILABLE),
                        (of_client(files), grpc.StatusCode.UNAVAILABLE),
                        (of_client(files, name="client"), grpc.StatusCode.UNAUTHENTICATED),
                        (of_client(files, name="client", token="b"),
                         grpc.StatusCode.UNAUTHENTICATED)):
                    assert await status(it.address, bad) == expected
                with pytest.raises(grpc.aio.AioRpcError) as large:
                    await anext(client.generate(make_request("o" * (MAX_MESSAGE_BYTES + 1))))
                assert large.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                rest = [token.id async for response in stream for token in response.tokens]
                assert rest == [*range(12, 111)]
                writer.close()
            load = it.server._loop.load
            assert load.accepted == load.finished == 1

    asyncio.run(main())


def test_a_token_is_asked_for_in_every_dialect(tmp_path):
    async def body(it: Running):
        async with grpc.aio.insecure_channel(it.address) as channel:
            for method in METHODS:
                path = f"/{method.containing_service.full_name}/{method.name}"
                for request in (b"", b"\xff"):  # the second is no message at all
                    call = (channel.stream_stream(path)(iter([request]))
                            if method.client_streaming else
                            channel.unary_stream(path)(request)
                            if method.server_streaming else
                            channel.unary_unary(path)(request))
                    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, path
                silent = channel.stream_stream(path)()  # refused before anything is sent
                assert await silent.code() is grpc.StatusCode.UNAUTHENTICATED, path

    on(ServerSecurity(tokens=write(tmp_path / "tokens", b"a-token\n")), body)


def test_reflection_can_be_off():
    async def body(it: Running):
        async with grpc.aio.insecure_channel(it.address) as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                [_ async for _ in call]
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert await status(it.address, ClientSecurity()) == grpc.StatusCode.OK

    on(ServerSecurity(), body, reflect=False)


@pytest.mark.parametrize("fields, message", [
    (dict(certificate="a"), "tls_certificate and tls_key must be given together"),
    (dict(key="a"), "tls_certificate and tls_key must be given together"),
    (dict(client_ca="a"), "tls_client_ca needs tls_certificate and tls_key"),
    (dict(certificate="missing", key="missing"), "tls_certificate missing cannot be read: No such"),
    (dict(tokens="missing"), "token_file missing cannot be read: No such file"),
    (dict(certificate="EMPTY", key="EMPTY"), "tls_certificate .* is empty"),
    (dict(certificate="TEXT", key="TEXT"), "tls_certificate must be a PEM file"),
    (dict(tokens="EMPTY"), "token_file .* is empty"),
    (dict(tokens="BINARY"), "token_file .* has a token, number 2, that no header can carry"),
    (dict(certificate="server_key", key="server"), "server.key and tls_key .* are no pair"),
    (dict(certificate="server", key="client_key"), "are no pair: KEY_VALUES_MISMATCH"),
    (dict(certificate="TORN", key="server_key"), ".*torn and tls_key .* are no pair"),
    (dict(certificate="server", key="server_key", client_ca="server_key"),
     "tls_client_ca .*server.key has no certificate"),
])
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(fields, message, tmp_path, files):
    known = files | {
        "BINARY": write(tmp_path / "binary", b"good \x00\xff"),
        "TORN": write(tmp_path / "torn", pathlib.Path(files["server"]).read_bytes()[:200]),
        "EMPTY": write(tmp_path / "empty", b" \n"), "TEXT": write(tmp_path / "text", b"abc")}
    with pytest.raises(ValueError, match=message):
        ServerSecurity(**{name: known.get(value, value) for name, value in fields.items()}).check()


def test_clients_options_are_checked_too(tmp_path):
    for fields, message in ((dict(ca="a"), "tls_ca needs tls"),
                            (dict(tls=True, key="a"), "must be given together"),
                            (dict(certificate="a", key="b"), "tls_certificate needs tls")):
        with pytest.raises(ValueError, match=message):
            ClientSecurity(**fields)
    with pytest.raises(ValueError, match="token must be printable ASCII"):
        ClientSecurity(token="a\tb")
    with pytest.raises(ValueError, match="tls_ca missing cannot be read"):
        ClientSecurity(tls=True, ca="missing").credentials()
    assert read_token(write(tmp_path / "token", b"abc\ndef\n")) == "abc"


def test_commands_take_the_flags(files, tmp_path):
    tokens = write(tmp_path / "tokens", b"a-token\n")

    async def body(it: Running):
        async def generate(*flags: str):
            return await asyncio.to_thread(
                run_cli, "generate", "--server", it.address, *flags, "zero")

        good = await generate("--tls_ca", files["ca"], "--token_file", tokens,
                              "--max_new_tokens", "3")
        assert (good.returncode, good.stdout) == (0, "one two three\n"), good.stderr
        bad = await generate("--tls_ca", files["ca"])
        assert bad.returncode == 1 and "UNAUTHENTICATED: authorization must be" in bad.stderr

    on(of_server(files, tokens=tokens), body)
    refused = run_cli("serve", "--tls_key", files["server_key"])
    assert refused.returncode == 1
    assert refused.stderr == "tpuspec serve: tls_certificate and tls_key must be given together\n"
