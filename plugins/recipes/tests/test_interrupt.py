"""The first Ctrl-C asks, the second one stops."""

import os
import signal
import threading

import pytest

from twinkle_recipes.run.stopping import StopRequest


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_signal_asks_and_tells() -> None:
    heard = []
    with StopRequest(lambda: heard.append(True)) as stop:
        assert not stop.requested
        press()
        assert stop.requested
    assert heard == [True]


def test_the_signal_of_a_scheduler_asks_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_check_stops_only_once_asked() -> None:
    with StopRequest() as stop:
        stop.check()
        press()
        with pytest.raises(KeyboardInterrupt):
            stop.check()


def test_the_second_signal_stops_at_once() -> None:
    with StopRequest() as stop:
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert stop.requested


def test_the_handler_from_before_is_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_may_train_without_listening() -> None:
    states = []

    def work() -> None:
        with StopRequest() as stop:
            states.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert states == [False]
