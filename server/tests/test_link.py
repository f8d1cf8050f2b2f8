"""Messages cross the socket whole and in order, small and large, and both ends notice when the other is gone."""

import asyncio
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_runtime import SOON, within

from twinkle_server.engine.messages import AsyncLink, BlockingLink, LinkClosed, Message

MESSAGES = st.lists(
    st.builds(
        Message,
        st.sampled_from(["run", "done"]),
        st.dictionaries(
            st.text(max_size=4).filter(lambda name: name != "type"), st.integers(-(2**31), 2**31), max_size=4
        ),
        st.binary(max_size=300),
    ),
    max_size=8,
)


@given(MESSAGES, st.sampled_from([0, 200_000]))
@settings(max_examples=20, deadline=None)
def test_what_is_sent_is_what_arrives(sent: list[Message], padding: int) -> None:
    ours, theirs = socket.socketpair()
    sent = [Message(each.type, each.head, each.body + bytes(padding)) for each in sent]

    def echo() -> None:
        link = BlockingLink(theirs)
        for message in link:
            link.send(message)
        link.close()

    async def scenario() -> list[Message]:
        link = await AsyncLink.open(ours)
        for message in sent:
            link.put(message)
        found = [await link.receive() for _ in sent]
        await link.room()
        link.close()
        return found

    thread = threading.Thread(target=echo)
    thread.start()
    assert within(SOON, scenario) == sent
    thread.join(SOON)
    assert not thread.is_alive()


def test_the_service_notices_that_the_engine_is_gone_also_in_the_middle_of_a_message() -> None:
    async def fill(link: AsyncLink) -> None:
        for _ in range(100):
            link.put(Message("run", {}, bytes(100_000)))
            await link.room()
            await asyncio.sleep(0)

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        link = await AsyncLink.open(ours)
        theirs.sendall(Message("done", {"id": 1}, b"whole").pack() + Message("done", {"id": 2}, b"cut").pack()[:-1])
        theirs.close()
        assert (await link.receive()).body == b"whole"
        with pytest.raises(LinkClosed):
            await link.receive()
        with pytest.raises(LinkClosed):
            await fill(link)
        link.close()

    within(SOON, scenario)


def test_the_engine_notices_that_the_service_is_gone() -> None:
    ours, theirs = socket.socketpair()
    link = BlockingLink(theirs)
    ours.sendall(Message("run", {"id": 1}).pack() + b"\x01\x02")
    ours.close()
    assert [message.head for message in link] == [{"id": 1}]
    with pytest.raises(LinkClosed):
        _send_much(link)
    link.close()


def _send_much(link: BlockingLink) -> None:
    for _ in range(100):
        link.send(Message("done", {}, bytes(100_000)))


def test_threads_of_the_engine_send_whole_messages() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        link, other = await AsyncLink.open(ours), BlockingLink(theirs)

        def send(name: str) -> None:
            for number in range(20):
                other.send(Message("done", {"name": name, "number": number}, bytes(70_000)))

        threads = [threading.Thread(target=send, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        found = [await link.receive() for _ in range(60)]
        for thread in threads:
            thread.join(SOON)
        for name in "abc":
            assert [each.head["number"] for each in found if each.head["name"] == name] == list(range(20))
        link.close()
        other.close()

    within(SOON, scenario)
