"""Pytest plugin: a line every few seconds, also while tests are collected, or one of them takes long."""

import threading

import pytest

from blockshock_lib.notebook import terminal


@pytest.hookimpl(tryfirst=True)  # before workers are started
def pytest_sessionstart(session):
    """A worker of xdist has no terminal."""
    if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
        session.config.add_cleanup((over := threading.Event()).set)
        threading.Thread(target=say, args=(reporter, over.wait), daemon=True).start()


def say(reporter, wait):
    """How many passed, until `wait`, which is given seconds, says that all is over."""
    while not wait(terminal.EVERY):
        reporter.write_line(f" {len(reporter.stats.get('passed', ()))} passed")
