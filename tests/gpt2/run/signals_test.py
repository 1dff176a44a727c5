import os
import signal
import subprocess
import sys

import pytest

from examples.gpt2.run.signals import StopRequest


@pytest.fixture
def handlers():
  numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
  before = {n: signal.getsignal(n) for n in numbers}
  yield lambda: {n: signal.getsignal(n) for n in numbers} == before
  for number, handler in before.items():
    signal.signal(number, handler)


@pytest.mark.parametrize(
  'number', [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
)
def test_a_signal_is_noted_until_the_end(handlers, number: int, capsys):
  with StopRequest() as stop:
    assert not handlers()
    assert stop.received() is None
    os.kill(os.getpid(), number)
    assert stop.received() == number
    assert stop.received() == number
  assert handlers()
  assert signal.Signals(number).name in capsys.readouterr().err


@pytest.mark.parametrize('first', [signal.SIGTERM, signal.SIGINT])
def test_the_second_interrupt_stops_at_once(handlers, first: int):
  with StopRequest() as stop:
    os.kill(os.getpid(), first)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.received() == first
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
  assert handlers()


def test_a_save_under_way_does_not_keep_the_second_interrupt_waiting():
  program = """
import os, signal, threading, time
from examples.gpt2.run.signals import StopRequest
with StopRequest():
  save = threading.Thread(target=time.sleep, args=[100])
  save.start()
  os.kill(os.getpid(), signal.SIGINT)
  os.kill(os.getpid(), signal.SIGINT)
  save.join()
"""
  done = subprocess.run(
    [sys.executable, '-c', program], check=False, timeout=90
  )
  assert done.returncode == -signal.SIGINT
