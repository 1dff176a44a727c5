import os
import signal
import subprocess
import sys

import pytest

from examples.gpt2.processes import StopRequest

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.mark.parametrize('number', _NUMBERS)
def test_the_first_signal_is_noted_until_the_end(number: int, capfd):
  before = [signal.getsignal(n) for n in _NUMBERS]
  with StopRequest() as stop:
    assert stop.received() is None
    for sent in (number, signal.SIGTERM):
      os.kill(os.getpid(), sent)
      assert stop.received() == number
  assert [signal.getsignal(n) for n in _NUMBERS] == before
  assert signal.Signals(number).name in capfd.readouterr().err


def test_nohup_outlives_its_terminal():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    with StopRequest() as stop:
      os.kill(os.getpid(), signal.SIGHUP)
      assert stop.received() is None
  finally:
    signal.signal(signal.SIGHUP, before)


def test_a_save_under_way_does_not_keep_the_second_interrupt_waiting():
  program = """
import os, signal, threading, time
from examples.gpt2.processes import StopRequest
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
